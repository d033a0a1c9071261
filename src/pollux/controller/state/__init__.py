"""The controller's state: jobs and their lifecycle, the cluster, measured costs of restarts and resizes.

Changed by `machine` alone. Imports `messages`.
"""
