"""The live protocol between the replicas of a job, the shim that supervises them, and the service.

Replicas and shim exchange keys of the job's store; shim and service exchange messages over a socket. Both sides must
have the same `PROTOCOL_VERSION`. Used by the agent, the shim, the node daemon and the dispatcher. Imports `_entry` and
`dataclass_codec`.
"""

from __future__ import annotations

__all__ = ["PROTOCOL_VERSION"]

PROTOCOL_VERSION = 2
"""The version of keys and messages. A process refuses any other version with one line."""
