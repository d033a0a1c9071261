"""Ray's head is lost and comes back: without Redis it has forgotten everything, so its nodes are started anew."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tests.integration.ray.conftest import wait
from tests.integration.ray.runs import RayRun

from pollux.backends.protocol import NodeDown, ReplicasEnded
from pollux.testing.jobs import float64_job

PORT = 6399
EPOCHS = 120


class Parts:
    """A head without GPUs and one node with four, started as people start them and ended by their numbers."""

    address = f"127.0.0.1:{PORT}"

    def __init__(self):
        # Sockets lie below, and their names may not be long.
        self.folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        self._running = []
        self.head = self.start_head()
        self.node = self.start_node()

    def _start(self, *words):
        environ = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
        # Nodes wait for a head for as long as a busy machine may take to start one.
        environ |= {"RAY_TMPDIR": str(self.folder), "RAY_gcs_rpc_server_reconnect_timeout_s": "300"}
        command = [
            str(Path(sys.executable).parent / "ray"),
            "start",
            "--block",
            "--object-store-memory=80000000",
            *words,
        ]
        # What is on another machine does not see the processes here: Ray refuses a second head beside what is left.
        apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"] if "--head" in words else []
        with (self.folder / f"part-{len(self._running)}.log").open("w") as log:
            process = subprocess.Popen([*apart, *command], env=environ, stdout=log, stderr=log, start_new_session=True)
        self._running.append(process)
        return process

    def start_head(self):
        head = self._start("--head", f"--port={PORT}", "--num-cpus=2", "--num-gpus=0", "--include-dashboard=false")
        wait(f"head; {head.poll()}", self._is_reached)
        return head

    def _is_reached(self):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", PORT), 1.0):
            return True

    def start_node(self):
        return self._start(f"--address={self.address}", "--num-cpus=8", "--num-gpus=4")

    def kill(self, process):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def logs(self):
        return "\n".join(path.read_text()[-1500:] for path in sorted(self.folder.glob("part-*.log")))

    def end(self):
        for process in self._running:
            self.kill(process)
        shutil.rmtree(self.folder, ignore_errors=True)


class Run(RayRun):
    """A job that is not started again by itself, as the service does it when there is somewhere to."""

    def start(self, gpus):
        self.state = "lost"


@pytest.fixture
def parts():
    made = Parts()
    yield made
    made.end()


def test_jobs_train_on_without_the_head_and_go_on_from_checkpoints_on_the_nodes_of_the_next(parts, tmp_path):
    run = Run(parts.address, tmp_path / "job", EPOCHS, "headless", 1, lease_seconds=60.0, lost_seconds=90.0)
    try:
        (node,) = run.names
        run.train_on({node: 2})
        replicas, told = float64_job.living(run.folder), len(run.events)
        parts.kill(parts.head)
        run.wait_for("warning", run.backend.warnings)
        assert run.backend.warnings()[0].startswith("lost the connection to Ray (")
        assert "check 'ray status' and --address; trying again" in run.backend.warnings()[0]
        assert (float64_job.living(run.folder), run.names, len(run.events)) == (replicas, [node], told), (
            "nobody is lost yet"
        )

        parts.head = parts.start_head()
        run.wait_for("end of the node", lambda: [event for event in run.of_nodes(NodeDown) if event.node_id == node])
        assert float64_job.living(run.folder) == replicas, "the node answers, so that its jobs can save"
        run.wait_for("warning", lambda: "has none of its earlier nodes" in "".join(run.backend.warnings()))
        # As a service does with the jobs of a node that is down.
        run.backend.stop(run.job_id, run.generation, 40.0)
        run.wait_for("end", lambda: [event for event in run.events if isinstance(event, ReplicasEnded)])
        (ended,) = [event for event in run.events if isinstance(event, ReplicasEnded)]
        assert ended.outcome == "stopped", ended

        parts.kill(parts.node)
        parts.node = parts.start_node()
        run.wait_for("new node", lambda: run.names)
        run.wait_for("calm", lambda: not run.backend.warnings())
        run.train_on({run.names[0]: 2})
        verdict = run.finish()
        assert (verdict.samples_lost, verdict.samples_repeated, verdict.exact) == (0, 0, True), verdict
        assert verdict.largest_difference < 1e-9, verdict
        assert len(verdict.restarts) == 1, verdict
    except BaseException:
        print(parts.logs())
        raise
    finally:
        run.close()
