"""Commands about the service and this machine: up, down, doctor, config, backends.

Imported when such a command is given. Imports no other group of commands.
"""
