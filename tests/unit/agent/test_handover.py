"""What those that leave, and those that come in the place of all, make of the state and of the pause."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import pollux
from pollux.agent.checkpoint.state import State
from pollux.agent.distributed.environment import Environment
from pollux.agent.distributed.process_group import ReplicaGroup
from pollux.agent.elastic import generation_move as module
from pollux.agent.elastic.member import ElasticMember
from pollux.agent.elastic.member_states import FirstStep, Regrouping, Training
from pollux.agent.elastic.membership import Membership
from pollux.agent.elastic.pause import ResizePause
from pollux.wire.live.keys import PREFIX
from pollux.wire.live.plan import GenerationPlan, PlanDeadlines, PlanMember

PLAN = GenerationPlan(1, 0, (PlanMember(0, None),), deadlines=PlanDeadlines(join=5.0, transfer=5.0), senders=(0, 1))


class Job:
    """At step 3; what is asked of it is written down."""

    def __init__(self):
        self.calls: list[str] = []

    def position(self):
        return (3, 0, 0, 36)

    def local_state(self, whole):
        return State()

    def __getattr__(self, name):
        return lambda *arguments: self.calls.append(name)


@pytest.fixture
def live():
    return ElasticMember(
        Membership(dist.HashStore(), 0, 0), ReplicaGroup(Environment(), torch.device("cpu")), joins=False
    )


def keys(live: ElasticMember) -> Any:
    return dist.PrefixStore(PREFIX, live.membership.store)


def told(live: ElasticMember, key: str) -> bytes:
    """What this replica has told; empty where that is nothing, which the store would wait for."""
    text: bytes = keys(live).get(key) if keys(live).check([key]) else b""
    return text


def among(live: ElasticMember, *steps: float | None) -> None:
    """This replica, None, among others at these steps; -1 for those that have no state."""
    table = [None if step is None else [step, 0.0, 0.0, 36.0] for step in steps]
    fake = SimpleNamespace(replica=steps.index(None), num_replicas=len(steps), control=None)
    fake.gather = lambda mine: [mine if row is None else row for row in table]
    live.move._replicas = fake  # type: ignore[assignment]


@pytest.fixture
def exchanged(monkeypatch):
    """What was given to the exchange, and the state that comes of it."""
    seen = SimpleNamespace(given=[], state=State(values={"num_replicas": 1}))

    def exchange(*arguments: Any) -> tuple[State, int]:
        seen.given.append(arguments)
        return seen.state, 7

    monkeypatch.setattr(module, "pack", lambda state: state)
    monkeypatch.setattr(module, "exchange", exchange)
    return seen


def test_what_it_takes_to_gather_the_state_counts_once(live, exchanged, monkeypatch):
    clock = [100.0]

    class Slow(Job):
        def local_state(self, whole):
            clock[0] += 5.0
            return State()

    monkeypatch.setattr(module.time, "perf_counter", lambda: clock[0])
    among(live, -1.0, None)
    move = Regrouping(PLAN, Training(), 99.0, 1)
    live.move._transfer(Slow(), move, ResizePause(PLAN, "", 99.0))  # type: ignore[arg-type]
    ((packed, *_),) = exchanged.given
    assert packed.values["paused_seconds"] == 1.0


def test_who_leaves_a_step_behind_another_keeps_what_it_holds(live, exchanged):
    among(live, -1.0, None, 4.0)
    move = Regrouping(PLAN, Training(), 0.0, 2)
    receives, _ = live.move._transfer(Job(), move, ResizePause(PLAN, "", 0.0))  # type: ignore[arg-type]
    ((packed, senders, receivers, *_),) = exchanged.given
    assert (packed, senders, receivers) == (None, [2], [0]), "only those that join receive"
    assert not receives
    assert move.has_state


def test_who_stays_a_step_behind_another_receives(live, exchanged):
    among(live, -1.0, None, 4.0)
    plan = GenerationPlan(1, 0, tuple(PlanMember(rank, was) for rank, was in enumerate((None, 0, 1))))
    move = Regrouping(plan, Training(), 0.0, 2)
    receives, _ = live.move._transfer(Job(), move, ResizePause(plan, "", 0.0))  # type: ignore[arg-type]
    assert exchanged.given[0][1:3] == ([2], [0, 1])
    assert receives


def test_a_request_to_stop_does_not_overtake_the_word_that_nobody_needs_it(live, monkeypatch):
    """Both come between two looks: those that joined hold the state, and this one must not save an older one."""

    def stop() -> bool:
        keys(live).set("handed/1", "")
        return True

    live.move.stop_wanted = stop
    live.move._wait_for(PLAN, lambda: live.membership.is_handed_over(1), 5.0)


def just_come(tmp_path: Any, monkeypatch: Any, live: ElasticMember) -> tuple[Any, list[bool]]:
    """A job that has just got its state, and whether each time it saves that pause is over, so that others leave."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    data = TensorDataset(torch.randn(16, 3), torch.randint(0, 2, (16,)))
    job: Any = pollux.init(model, torch.optim.SGD(model.parameters(), 0.1), data, 8, checkpoint_dir=tmp_path)
    save, saves = job._parts.checkpointer.save, []

    def noted(*arguments: Any, **named: Any) -> None:
        saves.append(bool(keys(live).check(["done/1/0"])))
        save(*arguments, **named)

    monkeypatch.setattr(job._parts.checkpointer, "save", noted)
    job._parts.member = live
    live.states.now = FirstStep(ResizePause(PLAN, "move", 0.0))
    return job, saves


def test_one_that_comes_when_the_job_is_through_does_not_hold_who_leaves_up(tmp_path, monkeypatch, live):
    """Who leaves keeps the folder of checkpoints until all others have said that they go on."""
    job, saves = just_come(tmp_path, monkeypatch, live)
    with job:
        job._loop._finish()
    assert saves[0]
    assert b'"finished"' in told(live, "beat/0/0")


@pytest.mark.parametrize("wait", [True, False])
def test_a_save_before_the_first_step_does_not_hold_who_leaves_up(tmp_path, monkeypatch, live, wait):
    job, saves = just_come(tmp_path, monkeypatch, live)
    with job:
        job.checkpoint(wait=wait)
        # What is written by a thread holds nobody up.
        assert saves == [wait]


def test_that_the_job_is_through_is_told_where_its_loop_was_left(tmp_path, monkeypatch, live):
    job, _ = just_come(tmp_path, monkeypatch, live)
    with job:
        for _ in job.epochs(3):
            for x, y in job.batches():
                job.backward(F.cross_entropy(job.model(x), y))
            break
    assert b'"finished"' in told(live, "beat/0/0")
