"""Nodes that an engine takes back, forgets or loses, on real hosts: who answers may save, who is dead is gone."""

import textwrap

import pytest
from tests.support.fleet import ProcessFleet

from pollux.backends.fleet.backend import FleetBackend
from pollux.backends.protocol import NodeDown, NodeUp
from pollux.testing.conformance.backends import Bench

# So long that nothing here is lost by silence.
LEASE_SECONDS, LOST_SECONDS = 300.0, 400.0
SAVES = """
    import os, signal, sys, time
    from pathlib import Path
    me, seconds = os.environ["POLLUX_JOB"], float(os.environ["SAVE_SECONDS"])
    def told(number, frame):
        time.sleep(seconds)
        Path(f"{me}.saved").write_text("yes\\n")
        sys.exit(143)
    signal.signal(signal.SIGTERM, told)
    Path(f"{me}.up").write_text("yes\\n")
    time.sleep(600)
"""


class Engine(ProcessFleet):
    """One that may take nodes back (`goes`, with why), or not know of them any more (`forgets`)."""

    def __init__(self, folder):
        super().__init__(folder, num_nodes=1, slots=2, cold=True)
        self.goes = {}
        self.forgets = False

    def offer(self, hosts):
        super().offer([] if self.forgets else hosts)

    def leaving(self):
        return self.goes

    def take_back(self, **goes):
        self.goes = goes
        self._changed()


@pytest.fixture
def engine(tmp_path):
    made = Engine(tmp_path / "hosts")
    yield made
    made.kill_all()


@pytest.fixture
def bench(engine, tmp_path):
    def new(home):
        return FleetBackend(
            home, engine, head="127.0.0.1", warm=False, lease_seconds=LEASE_SECONDS, lost_seconds=LOST_SECONDS
        )

    bench = Bench(tmp_path, new)
    yield bench
    for each in bench.backend.running():
        bench.backend.stop(each.job_id, each.generation, 0.0)
        bench.backend.forget(each.job_id)
    bench.wait("empty backend", lambda: not bench.backend.running())
    bench.backend.close()


def runs(bench, save_seconds):
    bench.submit("job", textwrap.dedent(SAVES), env={"POLLUX_JOB": "job", "SAVE_SECONDS": str(save_seconds)})
    bench.file("job.up")


def downs(bench):
    return [event.node_id for event in bench.told if isinstance(event, NodeDown)]


@pytest.mark.parametrize("save_seconds", [0.0, 1.5])
@pytest.mark.parametrize("how", ["taken back", "forgotten"])
def test_what_runs_on_a_node_that_answers_has_its_grace(bench, engine, how, save_seconds):
    runs(bench, save_seconds)
    if how == "forgotten":
        engine.forgets = True
    else:
        engine.take_back(n0="drained")
    bench.wait("notice", lambda: downs(bench))
    assert (downs(bench), bench.backend.inventory(), bench.ends("job")) == (["n0"], (), [])
    # As the service does with jobs of a node that goes.
    bench.backend.stop("job", 1, 30.0)
    assert bench.end("job").outcome == "stopped"
    assert bench.file("job.saved") == "yes\n"


def test_a_node_that_is_forgotten_and_comes_back_is_used_again(bench, engine):
    runs(bench, 0.0)
    engine.forgets = True
    bench.wait("notice", lambda: downs(bench))
    engine.forgets = False
    bench.wait("node", lambda: len([event for event in bench.told if isinstance(event, NodeUp)]) == 2)
    assert [node.id for node in bench.backend.inventory()] == ["n0"]
    assert bench.ends("job") == [], "it ran all the time"


@pytest.mark.parametrize("before", ["held", "leaving"])
def test_what_ran_on_a_node_that_is_dead_is_lost_at_once(bench, engine, before):
    runs(bench, 0.0)
    if before == "leaving":
        engine.take_back(n0="drained")
        bench.wait("notice", lambda: downs(bench))
    engine.kill_node(0)
    assert bench.end("job").outcome == "lost"
    bench.wait("notice", lambda: downs(bench) == ["n0"])
