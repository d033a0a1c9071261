"""Live resize in the replicas: membership, sending state to joining replicas, heartbeats, requests between steps.

Runs in every replica; the supervisor's side is in `pollux.backends`. Imports `checkpoint`, `distributed` and below.
"""
