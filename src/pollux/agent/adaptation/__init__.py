"""What changes while a job trains: noise scale, batch, learning rate, the throughput model, and the loss guard.

Runs in every replica; all decide by the same numbers. Imports no framework: what it needs of one is in `measurements`.
"""
