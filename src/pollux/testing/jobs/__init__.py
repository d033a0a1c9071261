"""Real training jobs for tests: a small job, replicas forked in milliseconds, random changes, processes left behind.

Run by pytest and by benchmarks. Imports `ports` and `waiting`.
"""
