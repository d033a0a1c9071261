"""Nodes that an engine lends, and the slots on them.

Runs in the service. Imports `transport` and `process`.
"""
