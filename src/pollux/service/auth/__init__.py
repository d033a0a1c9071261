"""Authentication: tokens, and sessions of the web page.

Runs in the service. Imports no other part of the room.
"""
