"""Connections between the processes of a cluster: authenticated channels, and questions with one answer.

Runs in the service, in shims and on nodes. Imports no other part of the room.
"""
