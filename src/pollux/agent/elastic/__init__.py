"""Live resize inside the replicas: membership, transfer of state, heartbeats, requests between steps.

Runs in every replica; the shim's side is in `pollux.backends.shim`. Imports `checkpoint` and `distributed`.
"""
