"""The REST API: operations and their description, access, streams, uploads and the web page's files.

Runs in the service. `routes` has the operations and imports the other modules, not the reverse. Imports every other
part of the room but `server`.
"""
