"""Checkpoints in a folder or in an object store: written in the background, verified, loaded; with one writer.

Runs in every replica. Imports `distributed`.
"""
