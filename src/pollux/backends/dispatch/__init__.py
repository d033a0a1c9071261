"""The service's side of a backend: which job has which slots, its shims, and what they say.

Runs in a thread of the service. Imports `shim` for its messages, `nodes`, `transport` and `process`.
"""
