import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from pollux.agent.elastic.heartbeat import HeartbeatSource, thread_clock, thread_is_held_up
from pollux.testing.waiting import PATIENCE_SECONDS
from pollux.wire.live.heartbeat import Activity, Heartbeat


class Wall:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_the_first_step_is_announced_and_then_steps_speak():
    wall = Wall()
    beat = HeartbeatSource(wall=wall, clock=wall)
    said = Heartbeat(-1, 100.0, Activity.FIRST_STEP)
    assert beat.due() == said
    wall.now = 101.0
    assert beat.due() is not None
    beat.step, beat.busy = 1, Activity.TRAINING
    assert beat.due() is None, "one a second"
    wall.now = 102.0
    assert beat.due() == replace(said, step=1, at=102.0, activity=Activity.TRAINING)


def test_a_thread_that_is_stuck_says_nothing_and_one_that_waits_for_others_does():
    wall, held_up = Wall(), [False]
    beat = HeartbeatSource(wall=wall, clock=wall, held_up=lambda: held_up[0])
    beat.step, beat.busy = 7, Activity.TRAINING
    assert beat.due() is not None
    wall.now += 60.0
    assert beat.due() is None
    held_up[0] = True
    assert beat.due() == Heartbeat(7, 160.0, Activity.TRAINING, waiting=True)
    wall.now += 1.0
    assert beat.due() is not None


def test_who_waits_for_data_says_so_and_for_how_long():
    wall: Any = Wall()
    beat: Any = HeartbeatSource(wall=wall, clock=wall)
    beat.start_reading()
    assert beat.busy == Activity.FIRST_STEP, "that says more"
    for before in (Activity.TRAINING, Activity.PASS_END):
        beat.busy = before
        beat.start_reading()
        wall.now += 40.0
        told = beat.due()
        assert (told.activity, told.busy_seconds) == (Activity.DATA, 40.0)
        beat.start_computing()
        assert beat.busy == Activity.TRAINING


def test_a_clock_that_is_set_back_stops_no_beat():
    wall, clock = Wall(), Wall()
    beat = HeartbeatSource(wall=wall, clock=clock)
    assert beat.due() is not None
    wall.now -= 3600.0
    clock.now += 1.0
    assert beat.due() is not None


class Blocking(torch.autograd.Function):
    """A backward pass that hangs in Python code of the user's own."""

    gate = threading.Event()

    @staticmethod
    def forward(ctx: Any, value: Any) -> Any:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        Blocking.gate.wait()
        return gradients[0]


def in_a_thread(work: Callable[[], object]) -> tuple[Callable[[], bool], threading.Thread]:
    """What can be seen of a thread that does this, once it is at it."""
    made: list[Callable[[], bool]] = []

    def run() -> None:
        made.append(thread_is_held_up())
        work()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while not made:
        time.sleep(0.001)
    return made[0], thread


def settles(look: Callable[[], bool]) -> bool:
    """Whether it comes to be so, and stays so."""
    end, rows = time.monotonic() + PATIENCE_SECONDS, 0
    while time.monotonic() < end and rows < 20:
        rows = rows + 1 if look() else 0
        time.sleep(0.002)
    return rows >= 20


def test_a_thread_in_a_collective_is_told_from_one_that_hangs_elsewhere():
    for where, held_up in ((dist.__file__, True), (__file__, False)):
        lock, names = threading.Lock(), dict[str, Any]()
        exec(compile("def wait(lock):\n    lock.acquire()", where, "exec"), names)
        lock.acquire()
        look, thread = in_a_thread(lambda lock=lock, names=names: names["wait"](lock))  # type: ignore[misc]
        assert settles(lambda look=look, held_up=held_up: look() == held_up)  # type: ignore[misc]
        lock.release()
        thread.join()


def test_a_hang_in_a_hook_of_the_backward_pass_is_no_wait_for_others():
    value = torch.ones(1, requires_grad=True)
    look, thread = in_a_thread(lambda: Blocking.apply(value).sum().backward())
    assert settles(lambda: not look())
    Blocking.gate.set()
    thread.join()


def test_a_thread_that_computes_something_of_its_own_is_seen():
    wall, worked = Wall(), [1.0]
    beat = HeartbeatSource(wall=wall, clock=wall, worked=lambda: worked[0])
    beat.step, beat.busy = 7, Activity.TRAINING
    assert beat.due() is not None
    for seconds, seen in ((0.0, False), (0.2, True), (0.0, False), (0.0004, False), (0.0004, True)):
        wall.now += 1.0
        worked[0] += seconds
        assert (beat.due() is not None) == seen


def test_the_last_beat_is_told_at_once():
    wall = Wall()
    beat = HeartbeatSource(wall=wall, clock=wall)
    assert beat.due() is not None
    beat.busy = Activity.FINISHED
    assert beat.due() is None
    assert beat.last().activity == Activity.FINISHED


def test_the_clock_is_that_of_the_thread_that_asked_for_it():
    clock = thread_clock()
    before = clock()
    sum(range(300_000))
    used = clock() - before
    seen: list[float] = []
    other = threading.Thread(target=lambda: seen.extend([clock(), float(sum(range(3_000_000))), clock()]))
    other.start()
    other.join()
    assert used > 0.0
    assert seen[2] - seen[0] < used + 0.05, "that was another thread's work"
