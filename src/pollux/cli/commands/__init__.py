"""The commands of `pollux`, one module for each noun.

`pollux.cli.main` loads a module when its command is given. Imports `arguments`, `client`, `display` and `printing`.
"""
