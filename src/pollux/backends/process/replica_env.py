"""The environment of replicas: variables of the service, of the job and of torchrun. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from pollux.backends.nodes.slot import Slot
from pollux.backends.protocol import Launch
from pollux.wire.environment import TORCHRUN_VARIABLES

__all__ = ["common_variables", "inherited", "rank_variables", "run_id"]


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """The service's environment without its tokens and settings, and without variables of a run that it is part of."""
    return {
        name: value
        for name, value in environ.items()
        if name not in TORCHRUN_VARIABLES and not name.startswith(("POLLUX_", "TORCHELASTIC_", "NODE_RANK"))
    }


def run_id(home: Path, job_id: str, generation: int) -> str:
    """A name of a generation that is unique on this machine; every process of the generation has it as a variable."""
    place = hashlib.sha256(str(home).encode()).hexdigest()[:8]
    return f"pollux-{place}-{job_id}-{generation}"


def common_variables(
    launch: Launch, identity: str, head: str = "127.0.0.1", threads: int | None = None, loopback: bool = True
) -> dict[str, str]:
    """The variables of all replicas of a generation beside those they inherit; the port is added at the start.

    `head`: the address where replicas meet; `threads`: cores for each, None on GPUs; `loopback`: all run on one
    machine.
    """
    size = str(launch.placement.num_gpus)
    variables = {"PYTHONUNBUFFERED": "1"}
    if loopback:
        variables["GLOO_SOCKET_IFNAME"] = "lo"
    if threads is not None:
        variables["OMP_NUM_THREADS"] = str(max(1, threads))
    variables |= launch.env
    variables |= {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "WORLD_SIZE": size,
        "ROLE_WORLD_SIZE": size,
        "ROLE_NAME": "default",
        "MASTER_ADDR": head,
        "TORCHELASTIC_RUN_ID": identity,
        "TORCHELASTIC_RESTART_COUNT": str(max(0, launch.generation - 1)),
        "TORCHELASTIC_MAX_RESTARTS": str(max(0, launch.generation - 1)),
    }
    return variables


def rank_variables(places: Sequence[str], gpus: Mapping[str, int]) -> tuple[dict[str, str], ...]:
    """The variables of each replica by rank, from their places in that order and the GPU behind each place.

    A replica takes the GPU of its local rank among those that it sees at its start, and keeps it as long as it runs.
    """
    slots = [Slot.read(place) for place in places]
    nodes = [*dict.fromkeys(slot.node for slot in slots)]
    on = {node: [str(slot) for slot in slots if slot.node == node] for node in nodes}
    variables = []
    for rank, (slot, place) in enumerate(zip(slots, places, strict=True)):
        node = slot.node
        variables.append(
            {
                "RANK": str(rank),
                "LOCAL_RANK": str(on[node].index(place)),
                "ROLE_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(len(on[node])),
                "GROUP_RANK": str(nodes.index(node)),
                "NODE_RANK": str(nodes.index(node)),
                "GROUP_WORLD_SIZE": str(len(nodes)),
                "POLLUX_NUM_NODES": str(len(nodes)),
                "CUDA_VISIBLE_DEVICES": ",".join(str(gpus[each]) for each in on[node] if each in gpus),
            }
        )
    return tuple(variables)
