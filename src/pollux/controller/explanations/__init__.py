"""Explains why a job has its GPUs, when it will end, and what a plan will bring; never changes the state.

Called by the service. Imports `messages` and `state`.
"""
