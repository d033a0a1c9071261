"""The training job of a script: its training loop, rounds, checkpoints and resizes.

Runs in every replica. Imports every other part of the agent but `initialize` and `frameworks`.
"""
