"""Policies that choose how many GPUs each job has: one policy in each file.

Loaded by name through the registry. All are published but `castor`, which is Pollux's own. Imports `packing`, `reasons`
and `search`.
"""
