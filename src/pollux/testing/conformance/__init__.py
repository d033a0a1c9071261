"""Suites to inherit: tests that any policy, backend or store must pass. Imports `pollux.testing`'s builders."""
