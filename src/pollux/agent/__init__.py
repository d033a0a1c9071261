"""The part of Pollux inside a training job: data, exact averages, gradient noise, batch size, checkpoints.

It knows nothing of clusters, other jobs or policies. Each name below is imported on first use; most of them load
PyTorch. Packages that every framework can reuse, such as `adaptation`, do not.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pollux.agent.adaptation.noise_scale import NoiseEstimate as NoiseEstimate
    from pollux.agent.data.permutation import pass_order as pass_order
    from pollux.agent.initialize import init as init
    from pollux.agent.job.job import Job as Job
    from pollux.agent.job.job import JobStopped as JobStopped
    from pollux.agent.reporting.receipt import Receipt as Receipt
    from pollux.agent.reporting.status import PassLedger as PassLedger

__all__ = ["Job", "JobStopped", "NoiseEstimate", "PassLedger", "Receipt", "init", "pass_order"]

_HOMES = {
    "Job": "job.job",
    "JobStopped": "job.job",
    "NoiseEstimate": "adaptation.noise_scale",
    "PassLedger": "reporting.status",
    "Receipt": "reporting.receipt",
    "init": "initialize",
    "pass_order": "data.permutation",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pollux.agent' has no attribute '{name}'")
    return getattr(import_module(f"pollux.agent.{_HOMES[name]}"), name)
