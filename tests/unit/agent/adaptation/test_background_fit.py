"""The background fit: never waits, the newest request wins, failures and deadlines keep the last good result."""

import json
import subprocess
import sys
import threading

import pytest

from pollux.agent.adaptation.background_fit import BackgroundFit
from pollux.core.errors import CheckpointMismatch, InvalidInput
from pollux.goodput import FitResult, Observation, PublishedThroughput, fit
from pollux.testing.waiting import PATIENCE_SECONDS

LAW = PublishedThroughput(0.02, 0.001, 0.05, 0.002, 0.01, 0.001, 1.6)


def rows():
    return [
        Observation(nodes, gpus, size, LAW.compute_seconds(size), LAW.step_seconds(nodes, gpus, size))
        for nodes, gpus in ((1, 1), (1, 2), (1, 4), (2, 8))
        for size in (16.0, 64.0)
    ]


def good(alpha=0.1):
    return FitResult(PublishedThroughput(alpha, 0.001, 0.05, 0.002, 0.01, 0.001, 1.6), 0.0, True, "", 1)


class Gate:
    """A fitter that says when it has begun, and ends when told."""

    def __init__(self):
        self.begun = threading.Semaphore(0)
        self.may_end = threading.Semaphore(0)
        self.seen = []
        self.threads = []

    def __call__(self, observations, previous):
        self.seen.append((len(observations), previous))
        self.threads.append(threading.current_thread())
        self.begun.release()
        assert self.may_end.acquire(timeout=PATIENCE_SECONDS)
        return good(alpha=float(len(observations)))


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_it_fits_what_the_plain_fit_would():
    background = BackgroundFit(deadline_seconds=60.0)
    assert background.parameters is None
    background.request(rows())
    assert background.wait(PATIENCE_SECONDS)
    result = fit(rows())
    assert background.parameters == result.parameters
    assert background.parameters.step_seconds(2, 8, 64.0) == pytest.approx(LAW.step_seconds(2, 8, 64.0), rel=0.02)
    assert background.reason == result.reason
    background.close()


def test_asking_returns_at_once_and_the_newest_request_wins():
    gate = Gate()
    background = BackgroundFit(fitter=gate)
    background.request(rows()[:1])
    assert gate.begun.acquire(timeout=PATIENCE_SECONDS)
    background.request(rows()[:2])
    background.request(rows()[:3])
    assert background.parameters is None
    gate.may_end.release(2)
    assert background.wait(PATIENCE_SECONDS)
    assert background.parameters is not None
    assert background.parameters.alpha_c == 3.0
    assert [count for count, _ in gate.seen] == [1, 3]
    assert gate.seen[1][1] is not None, "the second fit starts from the first one's parameters"


def test_the_work_is_on_a_daemon_thread():
    gate = Gate()
    background = BackgroundFit(fitter=gate)
    background.request(rows())
    assert gate.begun.acquire(timeout=PATIENCE_SECONDS)
    assert gate.threads[0] is not threading.current_thread()
    assert gate.threads[0].daemon
    gate.may_end.release()
    assert background.wait(PATIENCE_SECONDS)


@pytest.mark.parametrize(
    ("failure", "word"),
    [
        (ValueError("no such law"), "ValueError: no such law"),
        (FitResult(None, 9.0, False, "no observations", 1), "no observations"),
        (FitResult(None, 9.0, False, "", 1), "did not converge"),
    ],
)
def test_a_failure_is_told_and_the_last_good_result_stays(failure, word):
    answers = [good(), failure]

    def fitter(observations, previous):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    background = BackgroundFit(fitter=fitter)
    for _ in range(2):
        background.request(rows())
        assert background.wait(PATIENCE_SECONDS)
    assert background.parameters == good().parameters
    assert word in background.reason


def test_a_fit_past_its_deadline_is_given_up_and_its_result_dropped():
    gate, clock = Gate(), Clock()
    background = BackgroundFit(deadline_seconds=5.0, fitter=gate, clock=clock)
    background.request(rows()[:1])
    assert gate.begun.acquire(timeout=PATIENCE_SECONDS)
    clock.now = 4.9
    assert background.reason == ""
    clock.now = 5.1
    assert "longer than 5 s" in background.reason
    background.request(rows()[:2])
    assert gate.begun.acquire(timeout=PATIENCE_SECONDS), "a new request does not wait for the late one"
    gate.may_end.release(2)
    for thread in gate.threads:
        thread.join(PATIENCE_SECONDS)
    assert background.parameters is not None
    assert background.parameters.alpha_c == 2.0
    assert background.reason == ""


def test_a_result_that_comes_late_unwatched_is_dropped_too():
    gate, clock = Gate(), Clock()
    background = BackgroundFit(deadline_seconds=5.0, fitter=gate, clock=clock)
    background.request(rows())
    assert gate.begun.acquire(timeout=PATIENCE_SECONDS)
    clock.now = 6.0
    gate.may_end.release()
    gate.threads[0].join(PATIENCE_SECONDS)
    assert background.parameters is None
    assert "longer than 5 s" in background.reason


def test_threads_that_never_end_are_few():
    gate, clock = Gate(), Clock()
    background = BackgroundFit(deadline_seconds=5.0, fitter=gate, clock=clock)
    for _ in range(5):
        background.request(rows())
        clock.now += 2.5
        gate.begun.acquire(timeout=0.2)
        clock.now += 5.1
    assert len(gate.threads) == 2
    assert "no fit started" in background.reason
    gate.may_end.release(2)
    for thread in gate.threads:
        thread.join(PATIENCE_SECONDS)
    background.request(rows())
    assert gate.begun.acquire(timeout=PATIENCE_SECONDS), "once they have ended, fits go on"
    gate.may_end.release()
    assert gate.threads[-1].join(PATIENCE_SECONDS) is None


def test_nothing_happens_without_rows_or_after_close():
    gate = Gate()
    background = BackgroundFit(fitter=gate)
    background.request([])
    background.close()
    background.close()
    background.request(rows())
    assert background.wait(0.0)
    assert gate.seen == []


def test_a_fit_under_way_at_close_changes_nothing_any_more():
    gate = Gate()
    background = BackgroundFit(fitter=gate)
    background.request(rows())
    assert gate.begun.acquire(timeout=PATIENCE_SECONDS)
    background.close()
    gate.may_end.release()
    gate.threads[0].join(PATIENCE_SECONDS)
    assert background.parameters is None


def test_parameters_go_on_after_json():
    background = BackgroundFit(fitter=lambda observations, previous: good())
    background.request(rows())
    assert background.wait(PATIENCE_SECONDS)
    other = BackgroundFit()
    assert json.loads(json.dumps(other.state_dict()))["parameters"] is None
    other.load_state_dict(json.loads(json.dumps(background.state_dict())))
    assert other.parameters == good().parameters
    with pytest.raises(CheckpointMismatch, match="version 9"):
        other.load_state_dict({"version": 9})


def test_a_deadline_must_be_positive():
    with pytest.raises(InvalidInput, match="deadline_seconds is 0"):
        BackgroundFit(deadline_seconds=0.0)


def run_script(body):
    script = f"""
import os, sys, threading, time, warnings
warnings.simplefilter("ignore", DeprecationWarning)
from pollux.agent.adaptation.background_fit import BackgroundFit
from pollux.goodput import FitResult, Observation, PublishedThroughput
rows = [Observation(1, 1, 16.0, 0.1, 0.1), Observation(1, 1, 32.0, 0.15, 0.15)]
{body}
"""
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_SECONDS)


def test_a_fit_that_never_ends_does_not_keep_the_interpreter_alive():
    result = run_script(
        """
background = BackgroundFit(fitter=lambda rows, previous: time.sleep(3600))
background.request(rows)
print("end")
"""
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "end\n", "")


def test_a_forked_child_fits_by_itself():
    result = run_script(
        """
gate = threading.Event()
def fitter(rows, previous):
    gate.wait(300)
    return FitResult(PublishedThroughput(0.1, 0.1, 0, 0, 0, 0, 1.0), 0.0, True, "", 1)
background = BackgroundFit(fitter=fitter)
background.request(rows)
held, let_go = threading.Event(), threading.Event()
def hold():
    with background._condition:     # a lock that another thread holds at the fork must not hang the child
        held.set()
        let_go.wait(300)
threading.Thread(target=hold).start()
held.wait(300)
child = os.fork()
if child == 0:
    gate.set()
    background.request(rows)
    ok = background.wait(300) and background.parameters is not None
    os._exit(0 if ok else 3)
let_go.set()
gate.set()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), background.wait(300), background.parameters is not None)
"""
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "0 True True\n", "")
