"""Commands that simulate: simulate, whatif, workload, policies.

Imported when such a command is given. Imports `cluster`, for the history that `whatif` replays.
"""
