"""The parts of a training that do not depend on the framework: rounds, and the batches of an epoch.

Runs in every replica. It needs no framework. Imports `adaptation` and `data`.
"""
