"""The state machine itself: what each event changes, which reports matter, how a decision becomes commands.

Runs in whoever drives the controller. Imports `codec`, `state` and `messages`.
"""
