from pollux.agent.heartbeat import FIRST_STEP, Heartbeat


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
