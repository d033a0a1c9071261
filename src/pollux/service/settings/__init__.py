"""The settings of a service, and its clock.

Used by the other packages of the service and by `pollux up`. Imports no other part of the room.
"""

from pollux.service.settings.service_settings import ANY_ADDRESS, DEFAULT_PORT, AtStop, ServiceSettings

__all__ = ["ANY_ADDRESS", "DEFAULT_PORT", "AtStop", "ServiceSettings"]
