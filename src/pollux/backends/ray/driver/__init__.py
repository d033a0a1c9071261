"""The process that speaks to Ray for the service, which must not end when Ray ends its drivers.

Run by `driver_client` beside the service. `loop` works through what comes, `host_actors` keeps an actor on every node,
`placement_groups` a group for every claim, `autoscaling` tells Ray how many nodes are needed. The service decides who
claims what. Imports `nodes`, `node_actor` and `driver_order`, and Ray itself at its start.
"""
