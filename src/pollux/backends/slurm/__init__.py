"""The backend on nodes that Slurm lends: in its mode with pilots, and in its mode with a batch job for each job.

`node_main` runs on nodes, everything else in the service. Imports `fleet`, `node_daemon`, `nodes` and `process`.
"""
