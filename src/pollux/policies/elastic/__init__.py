"""Published policies that choose how many GPUs each job has: one policy in each file.

Loaded by name through the registry. Imports `packing` and `search`, and no other policy.
"""
