"""Published policies that give each job the GPUs it asks for, and decide which jobs run: one policy in each file.

Loaded by name through the registry. Imports `packing`.
"""
