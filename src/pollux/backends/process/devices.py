"""The slots of this machine: GPUs where the driver shows some, else CPU slots; and the cores for each."""

from __future__ import annotations

import importlib
import math
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pollux.backends.process.cgroup import read_limits
from pollux.core import Node
from pollux.core.errors import BackendFailed, InvalidInput

__all__ = ["Devices", "check_lent", "find_devices"]

_MAX_SLOTS = 4096
_ASK_THE_DRIVER = (
    "see what 'nvidia-smi' says (after an upgrade of the driver the machine must be restarted), or give --slots if CPU "
    "slots are meant"
)


class _NoGpus(Exception):
    """Why no GPU was found, and what to do; `is_sure`: there is a driver, and it shows no GPU."""

    def __init__(self, why: str, remedy: str, is_sure: bool) -> None:
        super().__init__(why)
        self.remedy = remedy
        self.is_sure = is_sure


@dataclass(frozen=True, slots=True)
class Devices:
    """The node, the GPU index behind each of its slots (empty for CPU slots), and the cores that it may use.

    `why_none`: why no GPU was found, empty where none was looked for or some were found; `remedy`: what to do;
    `has_driver`: whether there was a driver to ask.
    """

    node: Node
    gpus: tuple[int, ...]
    cores: tuple[int, ...]
    why_none: str = ""
    has_driver: bool = True
    remedy: str = ""

    @property
    def is_cpu(self) -> bool:
        """Whether a "GPU" here is a slot of CPU cores."""
        return not self.gpus

    def cores_of(self, place: int, cpus_per_gpu: float = 0.0) -> tuple[int, ...]:
        """The cores of one slot: its even share, at least one; or as many as the job asked for, starting there."""
        total, places = len(self.cores), max(1, self.node.num_gpus)
        first = place * total // places
        count = max(1, (place + 1) * total // places - first)
        if cpus_per_gpu > 0 and not self.is_cpu:
            count = min(total, math.ceil(cpus_per_gpu))
            first = min(first, total - count)
        return self.cores[first : first + count]


def _node_name() -> str:
    name = socket.gethostname().split(".")[0]
    return name if re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?", name) else "local"


def _gpus() -> list[tuple[int, str, str]]:
    """Index, name and UUID of every GPU that the driver shows; `_NoGpus` where the driver cannot be asked."""
    try:
        pynvml: Any = importlib.import_module("pynvml")
    except ImportError:
        remedy = "with an NVIDIA GPU: pip install 'pollux-scheduler[service]'"
        raise _NoGpus("the Python package nvidia-ml-py is not installed", remedy, is_sure=False) from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        is_sure = getattr(error, "value", None) != pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
        remedy = _ASK_THE_DRIVER if is_sure else "with an NVIDIA GPU: install its driver"
        raise _NoGpus(f"NVML: {error}", remedy, is_sure) from None
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [
            (index, str(pynvml.nvmlDeviceGetName(handle)), str(pynvml.nvmlDeviceGetUUID(handle)))
            for index, handle in enumerate(handles)
        ]
    except pynvml.NVMLError as error:
        raise _NoGpus(f"NVML: {error}", _ASK_THE_DRIVER, is_sure=True) from None
    finally:
        pynvml.nvmlShutdown()


def _visible(found: list[tuple[int, str, str]], environ: Mapping[str, str]) -> list[tuple[int, str, str]]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves to this process, in its order; `_NoGpus` where it hides all."""
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return found
    chosen = []
    for word in listed.split(","):
        match = [
            gpu for gpu in found if str(gpu[0]) == word.strip() or (word.strip() and gpu[2].startswith(word.strip()))
        ]
        if not match:
            break
        chosen.append(match[0])
    if found and not chosen:
        why = f"CUDA_VISIBLE_DEVICES is '{listed}', which hides all {len(found)} GPUs of this machine"
        raise _NoGpus(why, "unset it, or give --slots if CPU slots are meant", is_sure=True)
    return chosen


def find_devices(slots: int | None, environ: Mapping[str, str]) -> Devices:
    """The GPUs in the driver's order; CPU slots if `slots` gives their number, or one per core if there is no GPU.

    The node has the memory and the cores that its control groups leave to this process, as in a container.
    """
    if slots is not None and (isinstance(slots, bool) or not 1 <= slots <= _MAX_SLOTS):
        raise InvalidInput(f"slots is {slots}: give a whole number from 1 to {_MAX_SLOTS}, or leave it out")
    cores = tuple(sorted(os.sched_getaffinity(0)))
    if slots is not None:
        return Devices(_node(slots, "cpu", len(cores)), (), cores)
    usable = max(1, int(min(len(cores), read_limits().cpus)))
    try:
        gpus = _visible(_gpus(), environ)
    except _NoGpus as none:
        return Devices(_node(usable, "cpu", len(cores)), (), cores, str(none), none.is_sure, none.remedy)
    if not gpus:
        return Devices(_node(usable, "cpu", len(cores)), (), cores)
    gpu_type = " and ".join(sorted({name for _, name, _ in gpus}))
    return Devices(_node(len(gpus), gpu_type, len(cores)), tuple(index for index, _, _ in gpus), cores)


def _node(num_gpus: int, gpu_type: str, num_cores: int) -> Node:
    limits = read_limits()
    memory = min(float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")), limits.memory_bytes)
    return Node(_node_name(), num_gpus, gpu_type, num_cpus=float(min(num_cores, limits.cpus)), memory_bytes=memory)


def check_lent(found: Devices, gpus: Sequence[int], lender: str, remedy: str) -> str:
    """A warning about the GPUs that `lender` lends on this machine; empty where the driver shows all of them.

    BackendFailed, with the remedy, where the driver does not show all of them: jobs there would only crash. Without a
    driver the lender is believed, with a warning: its GPUs may be of another make.
    """
    if set(gpus) <= set(found.gpus):
        return ""
    lent = ", ".join(map(str, gpus))
    if not found.has_driver:
        return (
            f"{lender} lends the GPUs {lent} there, and it cannot be checked whether they exist ({found.why_none}): "
            "install NVIDIA's driver and nvidia-ml-py on the node, or ignore this if they are of another make"
        )
    shown = ", ".join(map(str, found.gpus)) or "none"
    why = f" ({found.why_none})" if found.why_none else ""
    raise BackendFailed(f"{lender} lends the GPUs {lent} there, and the driver shows {shown}{why}: {remedy}")
