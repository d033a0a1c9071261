"""A Ray cluster of several nodes on this machine, with made-up GPUs: for tests, and to try things out.

    tools/ray/inside.sh python tools/ray/cluster.py --nodes 3 --gpus 4

Says its address as a line of JSON, then obeys JSON lines on its input, one answer each: {"do": "kill", "node": ID},
"stop" and "go on" (all processes of a node), "add" ("type": an accelerator's, "gpus": another number of them), "remove"
(a node that says goodbye), "nodes", "groups", "hold" and "release" (GPUs for a foreign job), "actor" (seconds to start
a plain one with a GPU), "kill host" and "end host" (the actor of a "service" on a node: its process gets SIGKILL, or
`ray.kill` ends it), "head" (ends the head). Ends with its input, and its nodes with it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Ray lets workers step back behind everything else; what they start inherits that.
os.environ.setdefault("RAY_worker_niceness", "0")

READY_SECONDS = 300  # on a busy machine; a wait ends with what it waits for


def below(pid: int) -> list[int]:
    """A process and everything that descends from it, itself first."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(folder.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def signal_all(pids: list[int], number: signal.Signals) -> None:
    """Send it to all that are still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


class Trial:
    """The cluster, and what can be done to it; nodes go by Ray's ids."""

    def __init__(self, nodes: int, gpus: int, cpus: int) -> None:
        # Read by Ray when it is loaded; its sockets lie below, and their names may not be long.
        self._folder = os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
        import ray
        from ray.cluster_utils import Cluster

        self._ray = ray
        self._shape = {"num_gpus": gpus, "num_cpus": cpus, "object_store_memory": 80_000_000}
        head = {"num_cpus": 2, "num_gpus": 0, "include_dashboard": False, "object_store_memory": 80_000_000}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._nodes = {node.node_id: node for node in (self._start() for _ in range(nodes))}
        self.address: str = self._cluster.address
        ray.init(self.address, namespace="trial", log_to_driver=False, logging_level="ERROR")
        self._cluster.wait_for_nodes(READY_SECONDS)
        self._held: Any = None

    def _start(self, **more: Any) -> Any:
        return self._cluster.add_node(wait=False, **{**self._shape, **more})

    def obey(self, order: dict[str, Any]) -> Any:
        """Do what a line says; what it has to answer."""
        doing = {
            "kill": lambda: self._kill(order["node"]),
            "stop": lambda: signal_all(self._processes(order["node"]), signal.SIGSTOP),
            "go on": lambda: signal_all(self._processes(order["node"]), signal.SIGCONT),
            "add": lambda: self._add(order.get("type"), order.get("gpus")),
            "remove": lambda: self._cluster.remove_node(self._nodes.pop(order["node"])),
            "nodes": self._ray.nodes,
            "groups": lambda: list(self._ray.util.placement_group_table().values()),
            "hold": lambda: self._hold(order["node"], order["gpus"]),
            "release": self._release,
            "actor": lambda: self._actor(order["node"]),
            "kill host": lambda: os.kill(self._host_process(order["service"], order["node"]), signal.SIGKILL),
            "end host": lambda: self._ray.kill(self._host(order["service"], order["node"])),
            "head": lambda: self._cluster.head_node.kill_gcs_server(),
        }
        return doing[order["do"]]()

    def _processes(self, node_id: str) -> list[int]:
        from ray._private.ray_constants import PROCESS_TYPE_RAYLET

        return below(self._nodes[node_id].all_processes[PROCESS_TYPE_RAYLET][0].process.pid)

    def _kill(self, node_id: str) -> None:
        """As a power cut does it: everything at once, and nobody can say goodbye."""
        doomed = self._processes(node_id)
        signal_all(doomed, signal.SIGSTOP)
        signal_all(doomed, signal.SIGKILL)

    def _host(self, service: str, node_id: str) -> Any:
        """The actor of a service of ours on a node."""
        return self._ray.get_actor(f"host-{node_id}", namespace=f"pollux-{service}")

    def _host_process(self, service: str, node_id: str) -> int:
        asked = self._host(service, node_id).__ray_call__.remote(lambda _: os.getpid())
        return int(self._ray.get(asked, timeout=60))

    def _add(self, accelerator: str | None, gpus: int | None) -> str:
        more: dict[str, Any] = {} if gpus is None else {"num_gpus": gpus}
        if accelerator is not None:
            more["resources"] = {f"accelerator_type:{accelerator}": 1}
        node = self._start(**more)
        self._nodes[node.node_id] = node
        return str(node.node_id)

    def _hold(self, node_id: str, gpus: int) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        @self._ray.remote
        class Holder:
            def ready(self) -> bool:
                return True

        pinned = NodeAffinitySchedulingStrategy(node_id, soft=False)
        self._held = Holder.options(num_gpus=gpus, num_cpus=0, scheduling_strategy=pinned).remote()
        self._ray.get(self._held.ready.remote(), timeout=60)

    def _release(self) -> None:
        self._ray.kill(self._held)

    def _actor(self, node_id: str) -> float:
        began = time.perf_counter()
        self._hold(node_id, 1)
        seconds = time.perf_counter() - began
        self._release()
        return seconds

    def end(self) -> None:
        """Kill all that is left, and remove what it wrote."""
        signal_all([pid for pid in below(os.getpid())[1:] if pid != os.getpid()], signal.SIGKILL)
        time.sleep(0.1)
        shutil.rmtree(self._folder, ignore_errors=True)


def main() -> None:
    """Start it, say where it is, obey."""
    options = argparse.ArgumentParser(description="A Ray cluster on this machine, with made-up GPUs.")
    options.add_argument("--nodes", type=int, default=3)
    options.add_argument("--gpus", type=int, default=4, help="made-up GPUs of each node")
    options.add_argument("--cpus", type=int, default=8, help="CPUs of each node")
    given = options.parse_args()
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    trial = Trial(given.nodes, given.gpus, given.cpus)
    try:
        print(json.dumps({"address": trial.address}), file=output, flush=True)
        for line in sys.stdin:
            print(json.dumps(trial.obey(json.loads(line)), default=str), file=output, flush=True)
    except KeyboardInterrupt:
        pass
    finally:
        trial.end()
    os._exit(0)


if __name__ == "__main__":
    main()
