"""What a job tells others: reports to the service, TensorBoard, and the receipt of what was done and why.

Runs in the first replica. Imports `adaptation` and what is below it.
"""
