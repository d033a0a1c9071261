"""The service's side of a backend: gives jobs slots, starts their shims, and handles what the shims report.

Runs in a thread of the service. Imports `nodes`, `process`, `protocol` and `transport`.
"""
