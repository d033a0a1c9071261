"""The half of Pollux inside a training job: data, exact averages, gradient noise, batch size, checkpoints.

It needs PyTorch and knows nothing of clusters, other jobs or policies.
"""

from pollux.agent.adaptation.noise_scale import NoiseEstimate
from pollux.agent.data.order import pass_order
from pollux.agent.initialize import init
from pollux.agent.job.job import Job, JobStopped
from pollux.agent.job.status import PassLedger
from pollux.agent.reporting.receipt import Receipt

__all__ = ["Job", "JobStopped", "NoiseEstimate", "PassLedger", "Receipt", "init", "pass_order"]
