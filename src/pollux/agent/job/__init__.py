"""The training job that a script holds: its training loop and rounds, its status, its checkpoints and its resizes.

Runs in every replica. Imports every other part of the agent but `initialize` and `frameworks`.
"""
