"""Nodes that lie about their GPUs under both engines are refused; of those that cannot tell, people hear."""

import os
import sys
import types

import pytest

from pollux.backends.process.devices import find_devices
from pollux.backends.ray import node_actor
from pollux.backends.slurm.node_main import facts_of
from pollux.core.errors import BackendFailed

NO_LIBRARY = 12


class NVMLError(Exception):
    def __init__(self, value, text):
        super().__init__(text)
        self.value = value


@pytest.fixture
def nvml(monkeypatch):
    """Have NVML show so many GPUs; `lost` is an index that cannot be read, `broken` why it does not start."""

    def shows(count, lost=None, broken=None):
        def start():
            if broken is not None:
                raise NVMLError(*broken)

        def handle(index):
            if index == lost:
                raise NVMLError(15, "GPU is lost")
            return index

        played = types.SimpleNamespace(
            NVMLError=NVMLError, NVML_ERROR_LIBRARY_NOT_FOUND=NO_LIBRARY, nvmlInit=start, nvmlShutdown=lambda: None,
            nvmlDeviceGetCount=lambda: count, nvmlDeviceGetHandleByIndex=handle,
            nvmlDeviceGetName=lambda handle: "A100", nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}",
        )  # fmt: skip
        monkeypatch.setitem(sys.modules, "pynvml", played)

    return shows


def by_ray(gpus):
    return node_actor._compare(gpus)


def by_slurm(gpus):
    listed = ",".join(map(str, gpus))
    facts_of({**os.environ, "CUDA_VISIBLE_DEVICES": listed}, len(gpus), 0)


@pytest.fixture(params=[by_ray, by_slurm], ids=["ray", "slurm"])
def lend(request):
    return request.param


def test_gpus_that_are_there_are_lent(nvml, lend):
    nvml(4)
    lend([0, 1, 2, 3])
    lend([2])


def test_fewer_gpus_than_were_lent(nvml, lend):
    nvml(2)
    with pytest.raises(BackendFailed, match="lends the GPUs 0, 1, 2, 3 there, and the driver shows 0, 1: "):
        lend([0, 1, 2, 3])


def test_a_driver_that_shows_none(nvml, lend):
    nvml(0)
    with pytest.raises(BackendFailed, match="the driver shows none: "):
        lend([0])


def test_a_gpu_that_is_lost(nvml, lend):
    nvml(4, lost=2)
    with pytest.raises(BackendFailed, match=r"the driver shows none \(NVML: GPU is lost\): "):
        lend([0, 1, 2, 3])


def test_a_driver_that_does_not_start(nvml, lend):
    nvml(4, broken=(18, "Driver/library version mismatch"))
    with pytest.raises(BackendFailed, match=r"shows none \(NVML: Driver/library version mismatch\): "):
        lend([0])


def no_driver(nvml, monkeypatch):
    nvml(0, broken=(NO_LIBRARY, "NVML Shared Library Not Found"))


def no_binding(nvml, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)


@pytest.mark.parametrize(
    ("without", "why"), [(no_driver, "Library Not Found"), (no_binding, "nvidia-ml-py is not installed")]
)
def test_without_anybody_to_ask_the_engine_is_believed_and_people_are_told(
    nvml, monkeypatch, lend, without, why, capfd
):
    without(nvml, monkeypatch)
    said = lend([0, 1]) or capfd.readouterr().out
    assert "lends the GPUs 0, 1 there, and it cannot be checked whether they exist (" in said
    assert why in said
    assert "install NVIDIA's driver and nvidia-ml-py on the node" in said


def test_slots_need_nobody_to_ask(nvml, monkeypatch):
    no_binding(nvml, monkeypatch)
    assert facts_of({}, 2, 3)["places"] == 3


def test_this_machine_has_cpu_slots_where_its_gpus_cannot_be_asked_for(nvml, monkeypatch):
    nvml(4, lost=2)
    found = find_devices(None, {})
    assert (found.is_cpu, found.has_driver, found.why_none) == (True, True, "NVML: GPU is lost")
    no_binding(nvml, monkeypatch)
    assert not find_devices(None, {}).has_driver
    nvml(2)
    assert (find_devices(None, {}).gpus, find_devices(None, {}).why_none) == ((0, 1), "")
