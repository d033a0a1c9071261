"""The backend for debugging: jobs run inside the process of the service, one after another.

Imports `dispatch` and the packages below it.
"""

from pollux.backends.inline.backend import InlineBackend

__all__ = ["InlineBackend"]
