"""The replicas of one job: environment variables, process groups, wrapped model, batch normalisation, aborts.

Runs in every replica. `environment` does not need PyTorch. Imports no other part of the room.
"""
