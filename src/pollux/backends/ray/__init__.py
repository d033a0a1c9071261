"""The backend on nodes that Ray lends: with a driver process beside the service, and an actor on each node.

`driver` runs in a process of its own, `node_actor` on nodes, everything else in the service. Imports `fleet`,
`node_daemon`, `nodes`, `process` and `transport`.
"""
