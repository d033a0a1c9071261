"""The cluster's own history replayed under other policies and sizes, in a process of its own.

Started by the service, one replay at a time. Imports no other part of the room.
"""
