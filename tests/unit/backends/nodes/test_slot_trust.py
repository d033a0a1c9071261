"""A GPU on which jobs fail that run well elsewhere, or that have nothing in common, is told and used last."""

import pytest

from pollux.backends.dispatch.slots import LocalSlotAllocator
from pollux.backends.nodes.slot import Slot
from pollux.backends.process.devices import Devices
from pollux.backends.protocol import Launch
from pollux.core import Node, Placement


def machine(gpus=(4, 5, 6)):
    return LocalSlotAllocator(Devices(Node("n", 3, "A100" if gpus else "cpu"), gpus, (0, 1, 2)), {})


def run(slots, job, outcome, num_gpus=1):
    """One job from its slots to its end; the indices of its slots, and what is added to how it ended."""
    placement = Placement.of({"n": num_gpus})
    launch = Launch(job, 1, placement, ("python", f"{job}.py"), "/work")
    places = slots.allocate(job, placement, (), ())
    line = slots.note_end(launch, places, outcome)
    slots.release_except(job, ())
    return [slot.index for slot in places], line


@pytest.mark.parametrize("outcome", ["crashed", "lost"])
def test_a_suspect_is_told_on_job_and_cluster_and_used_last(outcome):
    slots = machine()
    for job in "abc":
        assert slots.warnings() == ()
        place, line = run(slots, job, outcome)
        assert place == [0]
    (warning,) = slots.warnings()
    assert "GPU 4 of this machine is suspect: 3 different scripts failed there" in warning
    assert "CUDA_VISIBLE_DEVICES" in warning
    assert line == (warning if outcome == "crashed" else "")
    assert run(slots, "d", "succeeded")[0] == [1]
    assert run(slots, "e", "succeeded", 2)[0] == [1, 2]
    assert run(slots, "f", "succeeded", 3)[0] == [0, 1, 2], "it is used where there is no other"
    assert slots.warnings() == (), "a job ran well there"


def test_what_fails_everywhere_is_no_fault_of_a_gpu():
    slots = machine()
    for job in "abc":
        run(slots, job, "crashed")
    assert run(slots, "a", "crashed") == ([1], "")
    assert slots.warnings() == ()
    assert run(slots, "b", "crashed") == ([0], "")
    assert slots.warnings() == ()


def test_with_several_gpus_or_an_end_that_is_no_failure_none_is_blamed():
    slots = machine()
    for number, outcome in enumerate(["stopped", "out-of-memory", "refused"] * 3):
        run(slots, f"a{number}", outcome)
        run(slots, f"b{number}", "crashed", 2)
    assert slots.warnings() == ()


def test_slots_of_cpu_cores_do_not_break():
    slots = machine(gpus=())
    for job in "abcdef":
        assert run(slots, job, "crashed") == ([0], "")
    assert slots.warnings() == ()


def test_the_only_gpu_is_never_avoided():
    slots = LocalSlotAllocator(Devices(Node("n", 1, "A100"), (0,), (0,)), {})
    for job in "abcdef":
        assert run(slots, job, "crashed") == ([0], "")
    assert slots.warnings() == ()


def test_slots_of_another_service_are_no_slots():
    slots = machine()
    launch = Launch("x", 1, Placement.of({"n": 1}), ("python", "x.py"), "/work")
    for outcome in ("succeeded", "crashed", "crashed", "crashed"):
        assert slots.note_end(launch, (Slot("", 99),), outcome) == ""
    assert slots.warnings() == ()
