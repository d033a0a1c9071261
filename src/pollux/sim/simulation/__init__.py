"""The loop with the virtual clock, simulated jobs, the cost of a resize, and comparisons of many runs.

Runs in `pollux simulate`, in `pollux whatif` and in replays. Imports `applications` and `workloads`.
"""
