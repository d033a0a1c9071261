"""The service as a process: its folder, its address, certificates, and the web server.

Imports every other part of the room.
"""
