"""Who submits which job when: the file, the built-in workload, generated ones, and those of a recorded history.

Run before a simulation starts. Imports `applications`.
"""
