"""The process that speaks to Ray for the service: Ray ends its drivers, and the service must not end with them.

`driver_client` runs it beside the service. `loop` handles events, `host_actors` keeps an actor on every node,
`placement_groups` a group for every claim, `autoscaling` tells Ray how many nodes are needed. The service decides which
job claims what. Loads Ray at its start. Imports `driver_order`, `node_actor` and `nodes`.
"""
