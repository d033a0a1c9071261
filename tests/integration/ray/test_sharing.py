"""Several services and other people's Ray jobs on one cluster, and a cluster that is not there."""

import json
import time

import pytest
from tests.integration.ray.conftest import wait
from tests.integration.ray.runs import backend_at

from pollux.backends.protocol import BackendEvent, Launch, ReplicasEnded
from pollux.backends.ray.options import RayOptions
from pollux.backends.ray.provider import RayNodeProvider
from pollux.core import Placement


class At:
    """A backend of a service, and what it told."""

    def __init__(self, cluster, folder, service, nodes=3):
        self.told: list[BackendEvent] = []
        self.folder = folder
        self.backend = backend_at(folder, cluster.address, service, warm=False)
        self.backend.start(self.told.append)
        wait("nodes", lambda: len(self.backend.inventory()) >= nodes)

    def submit(self, job_id, placement, text):
        argv = ("python", "-c", text)
        self.backend.submit(Launch(job_id, 1, Placement.of(placement), argv, str(self.folder), grace_seconds=5.0))

    def end(self, job_id):
        def found():
            return [event for event in self.told if isinstance(event, ReplicasEnded) and event.job_id == job_id]

        return wait(f"end of {job_id}", found)[0]

    def close(self):
        for each in self.backend.running():
            self.backend.stop(each.job_id, each.generation, 0.0)
        wait("end of all", lambda: all(each.state == "ended" for each in self.backend.running()))
        self.backend.close()


@pytest.fixture
def at(cluster, tmp_path):
    made = []

    def make(service):
        made.append(At(cluster, tmp_path / service, service))
        return made[-1]

    yield make
    for one in made:
        one.close()


UNTIL_FILE = "import time, os\nwhile not os.path.exists('go'): time.sleep(0.01)\nprint('done')"


def test_two_services_share_a_cluster(cluster, at):
    one, two = at("for-all"), at("for-one")
    node = one.backend.inventory()[0].id
    assert {each.id for each in one.backend.inventory()} == {each.id for each in two.backend.inventory()}
    one.submit("same-name", {node: 2}, UNTIL_FILE)
    two.submit("same-name", {node: 2}, UNTIL_FILE)
    wait("groups of one", lambda: len(cluster.groups(service="pollux:for-all:")) == 2)
    wait("groups of the other", lambda: len(cluster.groups(service="pollux:for-one:")) == 2)
    wait("starts", lambda: one.backend.running()[0].state == two.backend.running()[0].state == "running")
    two.backend.stop("same-name", 1, 0.0)
    assert two.end("same-name").outcome == "stopped"
    wait("empty books", lambda: not cluster.groups(service="pollux:for-one:"))
    assert len(cluster.groups(service="pollux:for-all:")) == 2
    assert one.backend.running()[0].state == "running"
    (one.folder / "go").touch()
    assert one.end("same-name").outcome == "succeeded"


def test_gpus_of_a_foreign_job_are_not_for_us(cluster, at):
    service = at("for-all")
    node = service.backend.inventory()[0].id
    cluster("hold", node=cluster.ray_id(node), gpus=3)
    try:
        service.submit("wide", {node: 2}, "print('never')")
        ended = service.end("wide")
        assert ended.outcome == "refused"
        assert f"1 on {node}" in ended.detail
        assert "other Ray jobs" in ended.detail

        def left():
            return next(each.num_gpus for each in service.backend.inventory() if each.id == node)

        assert left() == 1
        service.submit("narrow", {node: 1}, "print('fits')")
        assert service.end("narrow").outcome == "succeeded"
    finally:
        cluster("release")
    wait("the node's return", lambda: left() == 4)
    wait("empty books", lambda: not cluster.groups(service="pollux:for-all:"))


def test_a_place_is_the_gpu_that_ray_has_reserved(cluster, tmp_path):
    (tmp_path / "ray.json").write_text(json.dumps({"service": "with-gpus"}))
    lender = RayNodeProvider(tmp_path, RayOptions(cluster.address), warm=False)
    lender.start(b"5" * 32, "127.0.0.1", lambda: None)
    try:
        hosted = wait("nodes", lambda: len(lender.hosts()) >= 3 and lender.hosts()[0])
        assert (hosted.gpus, hosted.node.gpu_type) == ((0, 1, 2, 3), "gpu")
        node = hosted.node.id
        lender.ask("one", {node: 3})
        wait("three", lambda: lender.held("one") == {node: (0, 1, 2)})
        lender.drop("one", {node: (1,)})
        lender.ask("two", {node: 2})
        wait("the two that are left", lambda: lender.held("two") == {node: (1, 3)})
    finally:
        lender.drop("one", {node: (0, 2)})
        lender.drop("two", {node: (1, 3)})
        wait("empty books", lambda: not cluster.groups(service="pollux:with-gpus:"))
        lender.close()


def test_a_cluster_that_is_not_there_is_said_and_does_no_harm(tmp_path):
    backend = backend_at(tmp_path, "127.0.0.1:1", "nowhere", warm=False)
    told: list[BackendEvent] = []
    backend.start(told.append)
    try:
        (said,) = wait("warning", backend.warnings)
        assert "Ray cannot be reached" in said
        assert backend.inventory() == ()
        assert backend.healthy
        assert told == []
    finally:
        began = time.monotonic()
        backend.close()
        assert time.monotonic() - began < 60
