"""The service as a process: the web application, its server, the folder, the address and certificates.

`pollux up` runs it. Imports `auth`, `clocks`, `deciding`, `engine`, `http`, `replay`, `settings` and `views`.
"""
