"""What is trained in a simulation: what an application may do, and implementations from models, profiles and history.

Read by simulated jobs and by workloads. Imports nothing else of the room.
"""
