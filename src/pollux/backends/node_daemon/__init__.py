"""The process on each lent node that starts and ends replicas there for the shims of jobs.

One process on each node. Imports `shim`, `transport` and `process`.
"""
