"""The node daemon and its job runners: they start and end replicas on a lent node for the shims of jobs.

One daemon on each node, and one runner for each job there. Imports `process` and `transport`.
"""
