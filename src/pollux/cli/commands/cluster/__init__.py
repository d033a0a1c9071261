"""Commands about the cluster that the service schedules: top, queues, history.

Imported when such a command is given. Imports no other group of commands.
"""
