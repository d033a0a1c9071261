"""The replicas of one job: their environment variables, process group, wrapped model, batch normalisation, aborts.

Runs in every replica. Imports no other part of the agent; `environment` does not import PyTorch.
"""
