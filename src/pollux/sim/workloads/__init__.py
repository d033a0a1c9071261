"""Workloads: from files, built in, generated, and from a recorded history.

Run before a simulation starts. Imports `applications`.
"""
