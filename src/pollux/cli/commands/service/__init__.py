"""Commands about the service and this machine: up, down, doctor, config, backends.

Loaded when such a command is given. Imports `arguments`, `client`, `display` and `printing`.
"""
