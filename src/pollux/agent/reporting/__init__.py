"""The state of a training and its outputs: reports to the service, TensorBoard scalars, the receipt.

Runs in every replica; replica 0 writes and sends. Imports `adaptation`, `data` and `distributed`.
"""
