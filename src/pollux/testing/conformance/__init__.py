"""Suites to inherit: tests that any policy, backend or store must pass.

Run by pytest, here and in other projects. Imports `builders`, `driver` and `waiting`.
"""

from pollux.testing.conformance.policies import PolicyConformance

__all__ = ["PolicyConformance"]
