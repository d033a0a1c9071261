"""The service as a process: the web application, its server, the folder, the address and certificates.

Imports every other part of the room.
"""
