"""The parts of a training that do not depend on the framework: rounds, and the batches of an epoch.

Runs in every replica. Imports no framework; it uses `adaptation` and `data`.
"""
