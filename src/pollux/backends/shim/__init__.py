"""The process beside each job: it starts the replicas, follows them, changes their number, and outlives the service.

One process for each job. Imports `nodes`, `process`, `protocol` and `transport`.
"""
