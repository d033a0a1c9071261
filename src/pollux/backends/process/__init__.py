"""Processes on one machine: starts replicas, finds them in /proc, and has devices, logs, records and outcomes.

Runs in the service, in shims and on nodes. Imports `nodes` and `protocol`.
"""
