"""How commands talk to a service: HTTP, uploads of folders, waiting for the service's end, receiving a job's reports.

Runs in the `pollux` command. Imports no other part of the room.
"""
