"""Three hosts with everything imported, two places each, for all tests of a module; and training jobs on them."""

import pytest
from tests.support.fleet_run import FleetNodes, FleetRun


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    made = FleetNodes(tmp_path_factory.mktemp("hosts"))
    made.start()
    yield made
    made.hosts.kill_all()


@pytest.fixture
def make_run(nodes, tmp_path):
    made = []

    def make(**more):
        nodes.await_all()
        made.append(FleetRun(nodes, tmp_path / "job", **more))
        return made[-1]

    yield make
    for run in made:
        run.close()
