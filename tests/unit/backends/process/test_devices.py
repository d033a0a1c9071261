"""What a machine has: GPUs in the driver's order, or slots of cores."""

import os
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.backends.local import LocalBackend
from pollux.backends.process import devices as devices_module
from pollux.backends.process.devices import Devices, find_devices
from pollux.core import Node
from pollux.core.errors import InvalidInput

CARDS = [(0, "A100", "GPU-aa"), (1, "A100", "GPU-bb"), (2, "A100", "GPU-cc")]


def test_slots_are_cpu_slots():
    devices = find_devices(5, {})
    assert (devices.node.num_gpus, devices.node.gpu_type, devices.is_cpu) == (5, "cpu", True)
    assert 0 < devices.node.num_cpus <= len(os.sched_getaffinity(0))
    assert devices.node.memory_bytes > 0


def test_without_gpus_there_is_a_slot_for_each_core(monkeypatch):
    monkeypatch.setattr(devices_module, "_gpus", list)
    devices = find_devices(None, {})
    usable = min(len(os.sched_getaffinity(0)), devices_module.read_limits().cpus)
    assert devices.node.num_gpus == max(1, int(usable))
    assert devices.is_cpu


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (0, 1, 2)),
        ({"CUDA_VISIBLE_DEVICES": "2,0"}, (2, 0)),
        ({"CUDA_VISIBLE_DEVICES": "GPU-bb"}, (1,)),
        ({"CUDA_VISIBLE_DEVICES": "1,7,0"}, (1,)),
    ],
)
def test_gpus_are_those_that_this_process_may_use(monkeypatch, environ, expected):
    monkeypatch.setattr(devices_module, "_gpus", lambda: CARDS)
    devices = find_devices(None, environ)
    assert devices.gpus == expected
    assert devices.node.num_gpus == len(expected)
    assert devices.node.gpu_type == "A100"


class NVMLError(Exception):
    def __init__(self, value, text):
        super().__init__(text)
        self.value = value


@pytest.fixture
def broken(monkeypatch):
    """Have NVML not start, for a reason with a number, of which 12 is that there is no driver."""

    def breaks(value, text):
        def start():
            raise NVMLError(value, text)

        played = SimpleNamespace(NVMLError=NVMLError, NVML_ERROR_LIBRARY_NOT_FOUND=12, nvmlInit=start)
        monkeypatch.setitem(sys.modules, "pynvml", played)

    return breaks


@pytest.fixture
def said(tmp_path):
    """What the local backend warns of, and why it has no GPUs."""

    def ask(slots=None):
        backend = LocalBackend(tmp_path, slots=slots, warm=False)
        backend.close()
        return backend.warnings(), backend.no_gpus

    return ask


def test_a_driver_that_does_not_work_is_warned_of(broken, said):
    broken(18, "Driver/library version mismatch")
    (warning,), (why, remedy) = said()
    assert why == "NVML: Driver/library version mismatch"
    assert warning == f"jobs get CPU slots instead of GPUs ({why}): {remedy}"
    for phrase in ("nvidia-smi", "restarted", "--slots"):
        assert phrase in remedy
    assert said(slots=2) == ((), ("", ""))


def test_a_machine_without_a_driver_is_no_worse_for_it(broken, said):
    broken(12, "NVML Shared Library Not Found")
    assert said() == ((), ("NVML: NVML Shared Library Not Found", "with an NVIDIA GPU: install its driver"))


@pytest.mark.parametrize("hidden", ["", "7", "MIG-aa"])
def test_gpus_that_are_hidden_are_warned_of(monkeypatch, said, hidden):
    monkeypatch.setattr(devices_module, "_gpus", lambda: CARDS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    (warning,), (why, remedy) = said()
    assert why == f"CUDA_VISIBLE_DEVICES is '{hidden}', which hides all 3 GPUs of this machine"
    assert why in warning
    assert remedy == "unset it, or give --slots if CPU slots are meant"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert said() == ((), ("", ""))


def test_slots_win_over_gpus(monkeypatch):
    monkeypatch.setattr(devices_module, "_gpus", lambda: CARDS)
    assert find_devices(2, {}).is_cpu


@pytest.mark.parametrize("slots", [0, -1, True, 100_000])
def test_bad_numbers_of_slots(slots):
    with pytest.raises(InvalidInput, match="slots is"):
        find_devices(slots, {})


@given(st.integers(1, 40), st.integers(1, 40))
def test_every_slot_has_its_share_of_cores(cores, slots):
    devices = Devices(Node("n", slots, "cpu"), (), tuple(range(10, 10 + cores)))
    shares = [devices.cores_of(place) for place in range(slots)]
    assert all(shares)
    assert all(set(share) <= set(devices.cores) for share in shares)
    if cores >= slots:
        assert sorted(core for share in shares for core in share) == list(devices.cores)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_gpus_have_as_many_cores_as_were_asked_for():
    devices = Devices(Node("n", 4), (0, 1, 2, 3), tuple(range(8)))
    assert [devices.cores_of(place, 3.5) for place in (0, 3)] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert devices.cores_of(1, 100.0) == tuple(range(8))
    assert devices.cores_of(2) == (4, 5)
