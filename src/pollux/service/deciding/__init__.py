"""The policy in a process of its own, so that deciding does not hold up requests.

`process_policy` is the service's side, `decision_process` the process seen from there, `worker` what runs there, and
`changes` how a snapshot travels. Imports no other part of the room.
"""
