"""Nodes that an engine such as Slurm lends to Pollux, and the slots on them.

Plain values and the interface `NodeProvider`, used in the service, in shims and in drivers. Imports no other part of
the room.
"""
