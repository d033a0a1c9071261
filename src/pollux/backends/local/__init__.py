"""The backend of this machine: a replica per GPU, or per CPU slot where there is no GPU.

Runs in the service, and in `pollux run`. Imports `dispatch`, `process` and `protocol`.
"""

from pollux.backends.local.backend import LocalBackend

__all__ = ["LocalBackend"]
