"""Commands about jobs: run, submit, ls, show, explain, logs, cancel, pause, resume, resize.

Imported when such a command is given. Imports no other group of commands.
"""
