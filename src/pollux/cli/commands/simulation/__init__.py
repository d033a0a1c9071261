"""Commands that simulate: simulate, whatif, workload, policies.

Loaded when such a command is given. `whatif` replays a history, which `cluster` reads. Imports `arguments`, `cluster`,
`display` and `printing`.
"""
