"""The results of a finished run: figures, fairness, plots and the report.

Run after a simulation has ended. Imports `applications`, `simulation` and `workloads`.
"""
