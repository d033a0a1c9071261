"""Slurm as a lender of nodes: the backend, pilots, one batch job for each job, and Slurm's commands.

`node_main` runs on nodes, everything else in the service.
"""
