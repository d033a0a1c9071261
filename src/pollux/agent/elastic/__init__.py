"""Live resize inside the replicas: membership, transfer of state, heartbeats, requests between steps.

Runs in every replica; the supervisor's side is in `pollux.backends`. Imports `checkpoint`, `distributed` and below.
"""
