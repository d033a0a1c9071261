"""The loop with the virtual clock, how simulated jobs progress, what a resize costs, and many runs side by side.

Runs in `pollux simulate`, in `pollux whatif` and in replays. Imports `workloads` and `applications`.
"""
