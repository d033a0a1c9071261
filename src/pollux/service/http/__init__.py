"""The REST API: the application, its description, who is let in, streams, uploads and the web page's files.

Runs in the service. Imports every other part of the room but `server`.
"""
