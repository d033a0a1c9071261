"""The backend for debugging: jobs run inside the process of the service, one after another.

Runs in the service. Imports `dispatch`, `process` and `protocol`.
"""

from pollux.backends.inline.backend import InlineBackend

__all__ = ["InlineBackend"]
