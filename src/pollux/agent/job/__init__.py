"""The training job of a script: its training loop, rounds, checkpoints and resizes.

Runs in every replica. Imports `adaptation`, `checkpoint`, `data`, `distributed`, `elastic`, `reporting`, `step` and
`training`.
"""
