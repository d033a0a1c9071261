"""Which replica reads which samples: the order of a pass, the loader, streams, and the ledger of what was read.

Runs in every replica. Imports no other part of the agent but `distributed`.
"""
