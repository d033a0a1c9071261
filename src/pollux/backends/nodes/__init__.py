"""Nodes that an engine such as Slurm lends to Pollux, and the slots on them.

Runs in the service. Imports `transport` and `process`.
"""
