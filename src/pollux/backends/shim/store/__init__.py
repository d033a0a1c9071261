"""The key-value store where the replicas of a job meet, and the process that hosts it.

The shim of the job forks that process. Imports `process` and `transport`.
"""
