"""What holds for every policy on any snapshot that a controller may show it."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pollux.core import NOWHERE, Cluster, Decision, Placement, Policy, Snapshot, check
from pollux.policies import create, names
from pollux.testing import after
from pollux.testing.strategies import plain_snapshots, snapshots

QUICK = {"pollux-genetic": {"population": 10, "generations": 5}}
WORK_CONSERVING = [
    ("fifo", {"strict": False}),
    *((name, {}) for name in names() if name not in ("fifo", *QUICK)),
]

every_policy = pytest.mark.parametrize("name", names())


def quick(name: str) -> Policy:
    return create(name, **QUICK.get(name, {}))


@settings(max_examples=100)
@given(snapshots(disturbed=False))
def test_running_jobs_were_placed_legally(snapshot):
    """About the strategy itself: if this fails, the other properties mean nothing."""
    assert check(snapshot, Decision(snapshot.running)) == ()


@every_policy
@settings(max_examples=60)
@given(snapshot=snapshots())
def test_decisions_are_legal_and_leave_the_immovable_alone(name, snapshot):
    policy = quick(name)
    for _ in range(2):
        decision = policy.allocate(snapshot)
        assert check(snapshot, decision) == ()
        for job in snapshot.jobs:
            before, now = snapshot.placement(job.id), decision.allocation.get(job.id, NOWHERE)
            if before and job.limits.pinned:
                assert now == before
            elif before and not job.limits.preemptible:
                assert now
        snapshot = after(snapshot, decision, 60.0)


@every_policy
@settings(max_examples=25)
@given(snapshot=snapshots())
def test_same_snapshot_same_decision(name, snapshot):
    policy = quick(name)
    first = policy.allocate(snapshot)
    assert policy.allocate(snapshot) == first == quick(name).allocate(snapshot)


@every_policy
@settings(max_examples=15)
@given(history=st.lists(snapshots(max_jobs=5), min_size=2, max_size=3))
def test_memory_of_an_unrelated_past_does_no_harm(name, history):
    memory = None
    for snapshot in history:
        remembering = replace(snapshot, memory=memory)
        decision = quick(name).allocate(remembering)
        assert check(remembering, decision) == ()
        memory = decision.memory


@every_policy
@settings(max_examples=25)
@given(snapshot=snapshots())
def test_names_of_nodes_do_not_matter(name, snapshot):
    """Only their order does; so ids are renamed against the order of the alphabet."""
    count = len(snapshot.cluster.nodes)
    new = {node.id: f"x{count - index}" for index, node in enumerate(snapshot.cluster.nodes)}
    nodes = [replace(node, id=new[node.id]) for node in snapshot.cluster.nodes]
    running = {job_id: renamed(placement, new) for job_id, placement in snapshot.running.items()}
    other = replace(snapshot, cluster=Cluster.of(nodes), running=running)
    expected = quick(name).allocate(snapshot).allocation
    found = quick(name).allocate(other).allocation
    assert found == {job_id: renamed(placement, new) for job_id, placement in expected.items()}


def renamed(placement: Placement, new: dict[str, str]) -> Placement:
    return Placement(tuple((new[node], count) for node, count in placement))


@pytest.mark.parametrize(("name", "options"), WORK_CONSERVING)
@pytest.mark.parametrize("size", [1, 2, 4])
@settings(max_examples=15)
@given(data=st.data())
def test_no_job_waits_beside_idle_gpus(name, options, size, data):
    snapshot: Snapshot = data.draw(plain_snapshots(size=size))
    allocation = create(name, **options).allocate(snapshot).allocation
    idle = snapshot.cluster.num_gpus - sum(placement.num_gpus for placement in allocation.values())
    waiting = [job.id for job in snapshot.jobs if not allocation.get(job.id)]
    assert not waiting or idle < size
