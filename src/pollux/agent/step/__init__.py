"""One optimiser step: weighted losses, gradient norms, clocks, and surviving too little memory.

Runs in every replica. Imports `data` and `distributed`.
"""
