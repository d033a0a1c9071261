"""One optimiser step: weighted losses, gradient norms, clocks, and surviving too little memory.

Runs in every replica. Imports `adaptation`, `data` and `distributed`.
"""
