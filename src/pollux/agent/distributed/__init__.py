"""The replicas of one job: environment variables, process groups, wrapped model, batch normalisation, aborts.

Runs in every replica. Imports no other part of the agent; `environment` does not import PyTorch.
"""
