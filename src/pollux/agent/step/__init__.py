"""One optimiser step: weighted losses, gradient norms, times, and how a step survives running out of memory.

Runs in every replica. Imports `adaptation`, `data` and `distributed`.
"""
