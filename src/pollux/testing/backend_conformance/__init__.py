"""Tests that any backend must pass: a lasting alias of `pollux.testing.conformance.backends`.

Run by pytest. Imports `conformance`.
"""

from pollux.testing.conformance.backends import BackendConformance

__all__ = ["BackendConformance"]
