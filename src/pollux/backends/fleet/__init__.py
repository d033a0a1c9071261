"""The part that backends with many nodes have in common: dispatching to lent nodes, watching them, shared folders.

Runs in the service. Imports `dispatch`, `nodes`, `process`, `protocol` and `transport`.
"""
