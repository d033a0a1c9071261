"""The state machine itself: what each event changes, which reports matter, how a decision becomes commands.

Runs in the driver of the controller. Imports `codec`, `messages` and `state`.
"""
