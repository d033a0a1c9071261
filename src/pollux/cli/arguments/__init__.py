"""How options are read, and the files and folders that they name.

Runs in the `pollux` command. Imports `client` and `printing`.
"""
