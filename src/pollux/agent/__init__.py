"""The half of Pollux inside a training job: data, exact averages, gradient noise, batch size, checkpoints.

It needs PyTorch and knows nothing of clusters, other jobs or policies.
"""

__all__: list[str] = []
