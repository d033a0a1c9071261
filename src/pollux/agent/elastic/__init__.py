"""Live resize, the replica's side: membership, moving state to joiners, heartbeats, requests between steps.

Runs in every replica; the supervisor's side is `pollux.backends`. Imports `checkpoint` and `distributed`.
"""
