"""The backend for debugging: jobs run inside the process of the service, one after another.

Imports `dispatch` and what is below it.
"""

from pollux.backends.inline.backend import InlineBackend

__all__ = ["InlineBackend"]
