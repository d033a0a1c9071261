"""Checkpoints in a folder or in an object store: writing in the background, verifying, leasing, loading.

Runs in every replica. Imports `distributed` and `data`, never `adaptation`.
"""
