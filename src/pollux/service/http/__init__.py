"""The REST API: operations and how they are described, who is let in, streams, uploads and the web page's files.

Runs in the service. `routes` has the operations and imports the other modules, not the reverse. Imports every other
part of the room but `server`.
"""
