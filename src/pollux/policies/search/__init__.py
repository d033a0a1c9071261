"""The best of many allocations: candidates for each job, the knapsack over them, the genetic search, the objective.

Shared by the policies. Imports `packing` and `reasons`.
"""
