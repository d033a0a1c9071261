"""How commands talk to a service: HTTP, uploads of folders, waiting for the service's end, receiving a job's reports.

Imports no other part of the room.
"""
