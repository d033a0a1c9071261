"""How results look in a terminal: tables, numbers, progress, screens.

Runs in the `pollux` command; it needs the types of `client` alone. Imports `client` and `printing`.
"""
