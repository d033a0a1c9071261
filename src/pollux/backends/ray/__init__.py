"""Ray as a lender of nodes: the backend, a driver process beside the service, an actor on each node.

`driver` runs in a process of its own, `node_actor` on nodes, everything else in the service.
"""
