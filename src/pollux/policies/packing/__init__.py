"""Where jobs fit: free GPUs, the placement board, the empty cluster, and admitting jobs in turn.

Shared by the policies. Imports `reasons`.
"""
