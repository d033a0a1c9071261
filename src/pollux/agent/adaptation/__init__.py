"""What adapts while a job trains: noise scale, batch, learning rate, throughput model, loss guard.

Runs in every replica; all decide from the same numbers. It needs no framework: `measurements` says what one supplies.
Imports `data`.
"""
