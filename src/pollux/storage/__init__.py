"""Object stores and their addresses, and archives of working folders that are sent to the service.

Used by the agent, the service, the backends and the command line. Imports `core`.
"""
