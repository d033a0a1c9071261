"""The environment of replicas: what they keep of the service's, the job's own, torchrun's. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from pollux.backends._devices import Devices
from pollux.backends.protocol import Launch
from pollux.wire.environment import TORCHRUN_VARIABLES

__all__ = ["common_variables", "inherited", "replica_variables", "run_id"]


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """The service's environment without what is its own: its tokens and settings, and any run it is itself part of."""
    return {
        name: value
        for name, value in environ.items()
        if name not in TORCHRUN_VARIABLES and not name.startswith(("POLLUX_", "TORCHELASTIC_", "NODE_RANK"))
    }


def run_id(home: Path, job_id: str, generation: int) -> str:
    """A name that no other generation of any job has, on this machine; every process of the generation carries it."""
    place = hashlib.sha256(str(home).encode()).hexdigest()[:8]
    return f"pollux-{place}-{job_id}-{generation}"


def common_variables(launch: Launch, devices: Devices, places: Sequence[int], identity: str) -> dict[str, str]:
    """What all replicas of a generation get beside what they inherit; the port follows at the start."""
    size = str(len(places))
    variables = {"PYTHONUNBUFFERED": "1", "GLOO_SOCKET_IFNAME": "lo"}
    if devices.is_cpu:
        share = min(len(devices.cores_of(place)) for place in places) if places else 1
        variables["OMP_NUM_THREADS"] = str(max(1, share))
    variables |= launch.env
    variables |= {
        "CUDA_VISIBLE_DEVICES": ",".join(str(devices.gpus[place]) for place in places) if devices.gpus else "",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "ROLE_WORLD_SIZE": size,
        "ROLE_NAME": "default",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_RUN_ID": identity,
        "TORCHELASTIC_RESTART_COUNT": str(max(0, launch.generation - 1)),
        "TORCHELASTIC_MAX_RESTARTS": str(max(0, launch.generation - 1)),
        "POLLUX_NUM_NODES": "1",
    }
    return variables


def replica_variables(replica: int) -> dict[str, str]:
    """What one replica gets beside what is common to all."""
    return {"RANK": str(replica), "LOCAL_RANK": str(replica), "ROLE_RANK": str(replica)}
