"""The thread that drives the controller: it applies events, writes facts, executes commands and makes decisions.

Runs in the service and in `pollux run`. Imports `auth`, `clocks`, `deciding`, `settings` and `views`.
"""
