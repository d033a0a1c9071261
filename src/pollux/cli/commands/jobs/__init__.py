"""Commands about jobs: run, submit, ls, show, explain, logs, cancel, pause, resume, resize.

Loaded when such a command is given. Imports `arguments`, `client`, `display` and `printing`.
"""
