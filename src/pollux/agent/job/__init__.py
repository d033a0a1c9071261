"""The training job that a script holds: its rounds, its status, and how it saves and changes size.

Runs in every replica. Imports every other part of the agent but `init` and `frameworks`.
"""
