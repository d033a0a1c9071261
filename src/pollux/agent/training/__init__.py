"""What every training has, whichever framework computes its steps: status, rounds, batches of an epoch.

Runs in every replica. Imports no framework; it uses `adaptation`, `data` and `reporting`.
"""
