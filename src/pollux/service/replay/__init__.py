"""The cluster's own history replayed under other policies and sizes, in a process of its own.

Imports `views` and what is below it.
"""
