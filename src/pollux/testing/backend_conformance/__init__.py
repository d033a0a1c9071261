"""Tests that any backend must pass: a lasting alias of `pollux.testing.conformance.backends`."""

from pollux.testing.conformance.backends import BackendConformance

__all__ = ["BackendConformance"]
