"""Processes on one machine: starting replicas, following them in /proc, devices, logs, how they ended.

Runs in the service, in shims and on nodes. Imports no other part of the room but `protocol`.
"""
