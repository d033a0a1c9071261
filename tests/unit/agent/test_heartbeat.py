import threading

from pollux.agent.heartbeat import FIRST_STEP, Heartbeat, thread_clock


class Wall:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_the_first_step_is_announced_and_then_steps_speak():
    wall = Wall()
    beat = Heartbeat(wall=wall)
    assert beat.due() == {"step": -1, "at": 100.0, "busy": FIRST_STEP, "waiting": False}
    wall.now = 101.0
    assert beat.due() is not None
    beat.step, beat.busy = 1, ""
    assert beat.due() is None, "one a second"
    wall.now = 102.0
    assert beat.due() == {"step": 1, "at": 102.0, "busy": "", "waiting": False}


def test_a_thread_that_is_stuck_says_nothing_and_one_that_waits_for_others_does():
    wall = Wall()
    beat = Heartbeat(wall=wall)
    beat.step, beat.busy = 7, ""
    assert beat.due() is not None
    wall.now += 60.0
    assert beat.due() is None
    beat.waiting = True
    assert beat.due() == {"step": 7, "at": 160.0, "busy": "", "waiting": True}
    wall.now += 1.0
    assert beat.due() is not None


def test_a_thread_that_computes_something_of_its_own_is_seen():
    wall, worked = Wall(), [1.0]
    beat = Heartbeat(wall=wall, worked=lambda: worked[0])
    beat.step, beat.busy = 7, ""
    assert beat.due() is not None
    for seconds, seen in ((0.0, False), (0.2, True), (0.0, False), (0.0004, False), (0.0004, True)):
        wall.now += 1.0
        worked[0] += seconds
        assert (beat.due() is not None) == seen


def test_the_last_beat_is_told_at_once():
    wall = Wall()
    beat = Heartbeat(wall=wall)
    assert beat.due() is not None
    beat.busy = "finished"
    assert beat.due() is None
    assert beat.last()["busy"] == "finished"


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
