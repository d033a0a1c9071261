"""The one thread that drives the controller: events in, facts written, commands executed, decisions made.

Runs in the service and in `pollux run`. Imports `views` and what is below it.
"""
