"""The half of Pollux inside a training job: data, exact averages, gradient noise, batch size, checkpoints.

It needs PyTorch and knows nothing of clusters, other jobs or policies.
"""

from pollux.agent.job import Job, JobStopped
from pollux.agent.noise import NoiseEstimate
from pollux.agent.order import pass_order
from pollux.agent.receipt import Receipt
from pollux.agent.start import init
from pollux.agent.status import PassLedger

__all__ = ["Job", "JobStopped", "NoiseEstimate", "PassLedger", "Receipt", "init", "pass_order"]
