"""Where files lie that are no messages: object stores and their addresses, and archives of working folders.

Used by the agent, the service, the backends and the command line. Imports `core` only.
"""
