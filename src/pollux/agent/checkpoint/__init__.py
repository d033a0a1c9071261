"""The training state on disk or in a store of objects: writing in the background, verifying, leasing, loading.

Runs in every replica. Imports `distributed` and `data`; never `adaptation`.
"""
