"""The service as a process: the web application, its server, the folder, the address and certificates.

`pollux up` runs it. Imports `auth`, `deciding`, `engine`, `http`, `replay` and `settings`.
"""
