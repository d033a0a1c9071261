"""Replicas of one job as PyTorch sees them: the process group, the wrapped model, batch normalisation, aborts.

Runs in every replica. Imports no other part of the agent but `environment`.
"""
