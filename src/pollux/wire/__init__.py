"""Messages between agent, service and command line: plain values with a strict codec, and the job file.

The names here are fetched from their modules when first asked for, so that one that is not needed costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pollux.wire.codec import decode, decode_json, encode, encode_json
    from pollux.wire.job import BatchSizes, CheckpointRequest, JobRequest, Resources
    from pollux.wire.jobfile import check_paths, job_to_mapping, parse_job, read_job_file
    from pollux.wire.quantities import parse_duration, parse_gpus, parse_size
    from pollux.wire.report import ModelReport, NoiseReport, Report, ReportReply
    from pollux.wire.status import Eta, JobStatus, NodeStatus, Plan, QueueStatus, ReasonStatus, ServiceStatus

__all__ = [
    "BatchSizes",
    "CheckpointRequest",
    "Eta",
    "JobRequest",
    "JobStatus",
    "ModelReport",
    "NodeStatus",
    "NoiseReport",
    "Plan",
    "QueueStatus",
    "ReasonStatus",
    "Report",
    "ReportReply",
    "Resources",
    "ServiceStatus",
    "check_paths",
    "decode",
    "decode_json",
    "encode",
    "encode_json",
    "job_to_mapping",
    "parse_duration",
    "parse_gpus",
    "parse_job",
    "parse_size",
    "read_job_file",
]

_MODULES = {
    "codec": ("decode", "decode_json", "encode", "encode_json"),
    "job": ("BatchSizes", "CheckpointRequest", "JobRequest", "Resources"),
    "jobfile": ("check_paths", "job_to_mapping", "parse_job", "read_job_file"),
    "quantities": ("parse_duration", "parse_gpus", "parse_size"),
    "report": ("ModelReport", "NoiseReport", "Report", "ReportReply"),
    "status": ("Eta", "JobStatus", "NodeStatus", "Plan", "QueueStatus", "ReasonStatus", "ServiceStatus"),
}


def __getattr__(name: str) -> Any:
    import importlib

    for module, names in _MODULES.items():
        if name in names:
            value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
