"""What a job reports: reports to the service, TensorBoard scalars, and the receipt of what was done and why.

Runs in the first replica. Imports `adaptation`, `distributed` and below.
"""
