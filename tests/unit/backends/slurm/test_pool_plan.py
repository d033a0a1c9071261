"""What follows from Slurm's books: which nodes are lent or left, which pilots are asked for or given back."""

from dataclasses import replace

import pytest

from pollux.backends.slurm.parse import JOB_STATES, PilotRow, read_nodes
from pollux.backends.slurm.pool_plan import NodeNote, plan_pool, view_pool
from pollux.backends.slurm.script import SlurmOptions

OPTIONS = SlurmOptions(nodes="1..4", gpus_per_node=4, margin_seconds=100.0, ahead_seconds=200.0)


def running(number, left=None, limit=None, state="RUNNING"):
    return PilotRow(f"7_{number}", state, left, limit, (f"node{number}",), "pilot", "")


def waiting(number, reason="Resources"):
    return PilotRow(f"7_{number}", "PENDING", None, None, (), "pilot", reason)


def note(number, **more):
    return NodeNote(f"node{number}", ("10.0.0.1", 5000 + number), 4, (0, 1, 2, 3), "A100", 16.0, 1e9, **more)


def notes(*numbers):
    return {(f"7_{number}", f"node{number}"): note(number) for number in numbers}


def states(**by_node):
    return read_nodes("".join(f"{node}|{state}|gpu:a100:4|10.0.0.1|64|none\n" for node, state in by_node.items()))[0]


def seen(rows, notes=None, nodes=None, running_seconds=None):
    return view_pool(OPTIONS, rows, nodes or {}, notes or {}, running_seconds or {})


def test_a_node_is_lent_once_its_host_is_up():
    picture = seen([running(10), running(2), running(1), waiting(3)], notes(1, 2))
    assert [hosted.node.id for hosted in picture.hosts] == ["node1", "node2"]
    assert picture.hosts[0].gpus == (0, 1, 2, 3)
    assert picture.steady == ("7_10", "7_2", "7_1")
    assert picture.waiting == ("7_3",)
    assert picture.warnings == ("1 node waits in Slurm's queue: Resources",)


def test_nodes_are_in_the_order_of_their_numbers():
    picture = seen([running(n) for n in (10, 2, 1)], notes(1, 2, 10))
    assert [hosted.node.id for hosted in picture.hosts] == ["node1", "node2", "node10"]


def test_the_type_comes_from_slurm_where_the_driver_says_none():
    silent = {("7_1", "node1"): replace(note(1), gpu_type="")}
    assert seen([running(1)], silent, states(node1="mixed")).hosts[0].node.gpu_type == "a100"
    assert seen([running(1)], silent).hosts[0].node.gpu_type == "gpu"


def test_a_node_is_left_before_the_limit_and_the_next_asked_for_earlier():
    far, near, due = (seen([running(1, left, 3600.0)], notes(1)) for left in (301.0, 299.0, 99.0))
    assert (far.steady, dict(far.leaving)) == (("7_1",), {})
    assert (near.steady, dict(near.leaving)) == ((), {})
    assert due.leaving == {"node1": "its pilot's time limit is near"}
    assert len(due.hosts) == 1


def test_margins_never_eat_a_whole_pilot():
    short = seen([running(1, 59.0, 60.0)], notes(1))
    assert short.steady == ("7_1",)
    assert dict(short.leaving) == {}


def test_drained_preempted_and_suspended_nodes_are_left():
    drained = seen([running(1)], notes(1), states(node1="draining"))
    assert drained.leaving == {"node1": "Slurm has it as draining"}
    told = seen([running(1)], {("7_1", "node1"): note(1, is_leaving=True)})
    assert told.leaving == {"node1": "Slurm announced the end of its pilot"}
    batch = seen([running(1)], {**notes(1), ("7_1", "-"): NodeNote(is_leaving=True)})
    assert batch.leaving == {"node1": "Slurm announced the end of its pilot"}
    assert seen([running(1, state="SUSPENDED")], notes(1)).leaving == {"node1": "Slurm suspended its pilot"}


@pytest.mark.parametrize("state", ["COMPLETING", "STAGE_OUT", "LAUNCH_FAILED", "DANCING"])
def test_a_pilot_that_is_about_to_end_is_left_and_another_counted(state):
    """KillWait may still run: only what Slurm has as ended is not offered any more."""
    picture = seen([running(1, state=state)], notes(1))
    assert [hosted.node.id for hosted in picture.hosts] == ["node1"]
    assert picture.leaving == {"node1": f"Slurm has its pilot as {state}"}
    assert picture.steady == picture.waiting == ()
    busy, idle = (plan_pool(OPTIONS, picture, 1, used, may_submit=True, may_shrink=True) for used in (["node1"], []))
    assert (busy.submit, busy.cancel) == (1, ())
    assert (idle.submit, idle.cancel) == (1, ("7_1",))


@pytest.mark.parametrize("state", ["SIGNALING", "RESIZING", "UPDATE_DB"])
def test_a_pilot_that_slurm_does_something_to_is_still_held(state):
    assert seen([running(1, state=state)], notes(1)) == seen([running(1)], notes(1))


@pytest.mark.parametrize("state", ["down*", "down", "fail", "powering_down", "dancing"])
def test_a_node_that_slurm_has_as_down_is_left_while_its_pilot_is_there(state):
    picture = seen([running(1)], notes(1), states(node1=state))
    assert [hosted.node.id for hosted in picture.hosts] == ["node1"]
    assert picture.leaving == {"node1": f"Slurm has it as {state}"}
    assert picture.steady == ()


@pytest.mark.parametrize("state", [state for state, stand in JOB_STATES.items() if stand in ("gone", "waiting")])
def test_a_pilot_that_has_ended_or_waits_lends_nothing(state):
    assert seen([running(1, state=state)], notes(1)).hosts == ()


def test_a_node_that_lies_is_not_lent_and_not_asked_for_again():
    picture = seen([running(1)], {("7_1", "node1"): NodeNote(problem="2 GPUs are missing")})
    assert (picture.hosts, picture.faulty, picture.bad_nodes) == ((), ("7_1",), ("node1",))
    assert picture.warnings == ("node 'node1' cannot be used: 2 GPUs are missing",)
    assert plan_pool(OPTIONS, picture, 1, (), may_submit=True, may_shrink=False).cancel == ("7_1",)


def test_silence_is_told_after_a_while():
    assert seen([running(1)], running_seconds={"7_1": 10.0}).warnings == ()
    (warning,) = seen([running(1)], running_seconds={"7_1": 100.0}).warnings
    assert "shares" in warning


def test_what_lacks_is_asked_for_at_once():
    picture = seen([running(1), waiting(2)], notes(1))
    assert plan_pool(OPTIONS, picture, 4, (), may_submit=True, may_shrink=False).submit == 2
    assert plan_pool(OPTIONS, picture, 4, (), may_submit=False, may_shrink=False).submit == 0


def test_what_is_too_much_goes_later_and_never_under_a_job():
    picture = seen([running(1), running(2), waiting(3)], notes(1, 2))
    assert plan_pool(OPTIONS, picture, 1, (), may_submit=True, may_shrink=False).cancel == ()
    assert plan_pool(OPTIONS, picture, 1, (), may_submit=True, may_shrink=True).cancel == ("7_3", "7_2")
    assert plan_pool(OPTIONS, picture, 1, {"node2"}, may_submit=True, may_shrink=True).cancel == ("7_3", "7_1")
    assert plan_pool(OPTIONS, picture, 3, (), may_submit=True, may_shrink=True).cancel == ()


def test_a_node_that_is_left_goes_once_it_is_empty():
    picture = seen([running(1, 50.0, 3600.0)], notes(1))
    assert plan_pool(OPTIONS, picture, 1, {"node1"}, may_submit=True, may_shrink=False).cancel == ()
    todo = plan_pool(OPTIONS, picture, 1, (), may_submit=True, may_shrink=False)
    assert (todo.cancel, todo.submit) == (("7_1",), 1)
