"""The REST API: operations and their description, access, streams, uploads and the web page's files.

Runs in the service. `routes` has the operations and uses the other modules, not the reverse. Imports `auth`, `engine`,
`presenters`, `replay`, `settings` and `views`.
"""
