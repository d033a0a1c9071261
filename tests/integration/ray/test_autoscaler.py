"""Ray's own autoscaler, with nodes that are processes here: it is asked for as many as jobs need, then for none."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tests.integration.ray import curve
from tests.integration.ray.conftest import wait
from tests.integration.ray.test_service import EPOCHS, SEEDS, Service, runs

# Ray's provider of nodes for trials looks for the head there and nowhere else.
PORT = 6379
GPUS = 4
MOST_NODES = 3
COMMANDS = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")


class Scaled:
    """A head without GPUs and an autoscaler that starts nodes of four made-up ones, and ends those that idle."""

    address = f"127.0.0.1:{PORT}"

    def __init__(self):
        # Sockets lie below, and their names may not be long.
        self.folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        kinds = {
            "ray.head.default": {"resources": {"CPU": 2}, "node_config": {}, "max_workers": 0},
            "gpus": {
                "resources": {"CPU": 8, "GPU": GPUS, "object_store_memory": 80_000_000},
                "node_config": {},
                "min_workers": 0,
                "max_workers": MOST_NODES,
            },
        }
        config = {
            "cluster_name": "trial",
            "max_workers": MOST_NODES,
            "upscaling_speed": 100,
            "idle_timeout_minutes": 0.1,
            "provider": {
                "type": "external",
                # All of them have the address of this machine.
                "use_node_id_as_ip": True,
                "disable_node_updaters": True,
                "disable_launch_config_check": True,
                "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
            },
            "available_node_types": kinds,
            "head_node_type": "ray.head.default",
            # What it would do on machines of a cloud, all of which must be said.
            **{name: {} for name in ("auth", "docker", "file_mounts")},
            **{name: [] for name in ("cluster_synced_files", "rsync_exclude", "rsync_filter")},
            **{f"{name}_commands": [] for name in COMMANDS},
            "file_mounts_sync_continuously": False,
        }
        path = self.folder / "autoscaler.json"
        path.write_text(json.dumps(config))
        environ = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", "RAY_FAKE_CLUSTER": "1"}
        environ |= {"RAY_TMPDIR": str(self.folder), "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
        command = [
            str(Path(sys.executable).parent / "ray"), "start", "--block", "--head", f"--port={PORT}", "--num-cpus=2",
            "--num-gpus=0", "--include-dashboard=false", "--object-store-memory=80000000",
            f"--autoscaling-config={path}",
        ]  # fmt: skip
        # A head of its own machine: it sees no other Ray's processes, and whatever it starts ends with it.
        apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        with (self.folder / "head.log").open("w") as log:
            self.process = subprocess.Popen(
                [*apart, *command], env=environ, stdout=log, stderr=log, start_new_session=True
            )

    def is_up(self):
        assert self.process.poll() is None, self.logs()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", PORT), 1.0):
            return True

    def logs(self):
        found = [self.folder / "head.log", *self.folder.glob("**/session_latest/logs/monitor*")]
        return "\n".join(f"{path.name}:\n{path.read_text()[-2500:]}" for path in found if path.exists())

    def end(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture
def scaled():
    made = Scaled()
    try:
        wait("head", made.is_up)
        yield made
    finally:
        made.end()


def test_nodes_come_for_a_job_stay_while_it_trains_and_go_when_nobody_needs_them(scaled, tmp_path):
    service = Service(tmp_path / "home", scaled, "autoscale=yes")
    try:
        assert service.nodes() == {}
        service.submit("first", 6)
        service.until("a job on nodes that were not there", lambda jobs: runs(jobs["first"]))
        assert sorted(service.nodes().values()) == [GPUS, GPUS], "as many as six GPUs need, and no more"
        assert sum(service.jobs()["first"]["placement"].values()) == 6
        (service.home / "fast").touch()
        service.until("end", lambda jobs: jobs["first"]["state"] == "succeeded")
        assert curve.found(service.home / "first") == pytest.approx(curve.expected(EPOCHS, SEEDS["first"]), rel=1e-9)
        wait("no nodes", lambda: not service.nodes())

        service.submit("second", 1)
        service.until("a job after that", lambda jobs: jobs["second"]["state"] == "succeeded")
    except BaseException:
        print(scaled.logs(), service.log())
        raise
    finally:
        service.pollux("down")
