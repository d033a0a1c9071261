"""Tests that any backend must pass: an alias that stays, of `pollux.testing.conformance.backends`."""

from pollux.testing.conformance.backends import BackendConformance

__all__ = ["BackendConformance"]
