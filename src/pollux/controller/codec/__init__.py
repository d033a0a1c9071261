"""Events and snapshots as plain JSON values, and back.

Used by the store through its drivers. Imports `messages` and `state`.
"""
