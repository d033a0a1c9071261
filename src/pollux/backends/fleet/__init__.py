"""What backends with many nodes share: dispatching over lent nodes, watching them, folders that nodes share.

Runs in the service. Imports `dispatch` and what is below it.
"""
