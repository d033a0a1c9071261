"""The applications that simulated jobs train: the interface, and implementations from models and profiles.

Read by simulated jobs and by workloads. Imports no other part of the room.
"""
