"""Suites to inherit: tests that any policy, backend or store must pass. Imports the builders beside it."""

from pollux.testing.conformance.policies import PolicyConformance

__all__ = ["PolicyConformance"]
