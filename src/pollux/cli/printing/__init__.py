"""All output of the command line, through one filter for control characters.

Runs in the `pollux` command. Imports no other part of the room.
"""
