"""Nodes of two accelerator types in one Ray cluster: a job runs on one of them, and on that which it names."""

import pytest
from tests.integration.ray.conftest import wait
from tests.integration.ray.test_service import Service

UNTIL_FILE = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.05)"


@pytest.fixture
def service(cluster, tmp_path):
    """On the three nodes of four that say no type, and two of two A100; those are gone again afterwards."""
    added = [cluster("add", type="A100", gpus=2) for _ in range(2)]
    running = Service(tmp_path / "home", cluster)
    try:
        yield running
    finally:
        (running.home / "go").touch()
        running.pollux("down")
        for node in added:
            cluster("remove", node=node)
        wait("end of the added", lambda: not any(cluster.is_alive(node) for node in added))


class Jobs:
    """Jobs that wait until they are ended, on the nodes of a service."""

    def __init__(self, service):
        self.service = service

    def types(self, job=None):
        """Of all nodes, or of those that a job is on."""
        known = {node["id"]: node["gpu_type"] for node in self.service.call("/v1/status")["nodes"]}
        return sorted(known.values()) if job is None else sorted({known[node] for node in job["placement"]})

    def submit(self, name, gpus, **resources):
        """Submit it, whatever becomes of it."""
        run, workdir = ["python", "-c", UNTIL_FILE], str(self.service.home)
        self.service.call(
            "/v1/jobs", {"name": name, "run": run, "gpus": gpus, "workdir": workdir, "resources": resources}
        )

    def running(self, name):
        """The job, once it runs."""
        return self.service.until(f"start of {name}", lambda jobs: jobs[name]["state"] == "running")[name]


def test_a_job_stays_on_one_type_and_runs_on_that_which_it_names(service):
    jobs = Jobs(service)
    wait("nodes", lambda: jobs.types() == ["A100", "A100", "cpu", "cpu", "cpu"])
    # 16 in all are free, and at most 12 of one type.
    jobs.submit("wide", "13")
    wait("reason", lambda: "it needs 13 GPUs, and there are 12" in service.call("/v1/jobs/wide/explain")["text"])
    jobs.submit("named", "3", gpu_type="A100")
    named = jobs.running("named")
    assert sorted(named["placement"].values()) == [1, 2]
    assert jobs.types(named) == ["A100"]
    jobs.submit("elastic", "9..16")
    assert jobs.types(jobs.running("elastic")) == ["cpu"]
    assert service.jobs()["wide"]["state"] == "queued"
    booked = service.cluster.groups(service="pollux:training:")
    assert sum(":named:" in name for name in booked) == 3
    assert not any(":wide:" in name for name in booked)
