"""Commands about the cluster that the service schedules: top, queues, history.

Loaded when such a command is given. Imports `arguments`, `client`, `display` and `printing`.
"""
