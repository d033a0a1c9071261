"""A real Ray cluster of three nodes with four made-up GPUs each, for all tests here; see tools/ray.

They need a namespace of their own (`make test-ray`); elsewhere there are no tests here.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pollux.testing.waiting import PATIENCE_SECONDS, wait_until

collect_ignore_glob = [] if os.environ.get("POLLUX_TEST_NAMESPACE") else ["test_*.py"]

ROOT = Path(__file__).parents[3]
STARTS = 3


@pytest.fixture(scope="session", autouse=True)
def _home(tmp_path_factory):
    """Not the user's own: a token in ~/.ray would make every Ray that is started here ask for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        yield


class Cluster:
    """The cluster's process, and what can be asked of it."""

    def __init__(self, nodes=3, gpus=4):
        words = [sys.executable, str(ROOT / "tools/ray/cluster.py"), "--nodes", str(nodes), "--gpus", str(gpus)]
        # Ray gives each of its nodes 30 seconds to start, which a busy machine may need for itself.
        for _ in range(STARTS):
            self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            if line := self.process.stdout.readline():
                break
            self.process.communicate()
        assert line, "the cluster ended; its reason is above"
        self.address = json.loads(line)["address"]

    def _answer(self):
        line = self.process.stdout.readline()
        assert line, "the cluster ended; its reason is above"
        return json.loads(line)

    def __call__(self, do, **more):
        self.process.stdin.write(json.dumps({"do": do, **more}) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def ray_id(self, node_id):
        """What Ray calls a node of ours."""
        return next(row["NodeID"] for row in self("nodes") if row["Alive"] and node_id.endswith(row["NodeID"][-6:]))

    def is_alive(self, ray_id):
        """Whether Ray says so of a node."""
        return next(row["Alive"] for row in self("nodes") if row["NodeID"] == ray_id)

    def groups(self, *, service=""):
        """The placement groups there are: node by name."""
        rows = [row for row in self("groups") if row["state"] != "REMOVED"]
        return {row["name"]: row["bundles_to_node_id"]["0"] for row in rows if service in row["name"]}

    def end(self):
        self.process.stdin.close()
        try:
            self.process.wait(PATIENCE_SECONDS)
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()


def wait(what, is_so, seconds=PATIENCE_SECONDS):
    """Whatever `is_so` gives, once it gives something."""
    return wait_until(what, is_so, seconds)


@pytest.fixture(scope="session")
def cluster():
    cluster = Cluster()
    yield cluster
    cluster.end()
