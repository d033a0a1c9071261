"""Nodes whose clocks are hours off, either way: nothing is lost or mistaken for hung, and times are the service's."""

import time

import pytest
from tests.integration.slurm.service import Service, is_live
from tests.integration.slurm.training import SAMPLES, begin, has_trained

HOURS = 3600.0
# Read by every interpreter on a node: what it takes for the time of day is wrong there.
OTHER_CLOCK = """
import os, time
apart, right = float(os.environ.get("CLOCK_IS_OFF_BY", "0")), time.time
time.time = lambda: right() + apart
"""


@pytest.fixture
def service(slurm, tmp_path):
    (tmp_path / "clocks").mkdir()
    (tmp_path / "clocks" / "sitecustomize.py").write_text(OTHER_CLOCK)
    setup = (
        f'export PYTHONPATH="{tmp_path / "clocks"}:$PYTHONPATH"; '
        f'[ "$SLURMD_NODENAME" = node1 ] && export CLOCK_IS_OFF_BY={3 * HOURS} || export CLOCK_IS_OFF_BY={-5 * HOURS}'
    )
    # Long enough that load alone raises no alarm.
    seconds = {"POLLUX_LEASE_SECONDS": "60", "POLLUX_LOST_SECONDS": "90"}
    running = Service(tmp_path / "home", slurm, slots=2, options={"setup": setup}, **seconds)
    try:
        running.wait("three nodes", lambda: len(running.nodes()) == 3)
        yield running
    finally:
        running.end()


def test_clocks_that_are_apart_do_no_harm(service):
    began = time.time()
    begin(service, "late", epochs=5, gpus=4)
    job = service.until("late", "live job", is_live)
    service.wait("a pass", lambda: has_trained(service, "late", 1))
    assert len(job["placement"]) == 2, "over two clocks, or nothing is shown"
    service.call("/v1/jobs/late/pause", {})
    service.until("late", "pause", lambda job: job["state"] == "paused")
    service.call("/v1/jobs/late/resume", {})
    service.until("late", "second start", is_live)
    job = service.ended_well("late", 5, SAMPLES)
    assert 0.0 < job["resize_costs"]["restart"] < HOURS, "from one clock to another"
    facts = [line["fact"] for line in service.history() if "fact" in line]
    assert len(facts) > 5
    assert all(began - 60.0 <= fact["at"] <= time.time() for fact in facts), facts
    ends = [fact["outcome"] for fact in facts if "outcome" in fact]
    assert ends == ["succeeded"], facts
    assert service.call("/v1/status")["warnings"] == []
