"""How commands talk to a service: HTTP, sending a folder, waiting for its end, receiving a job's reports.

Imports no other part of the room.
"""
