"""Records what real Slurm and Ray clusters say while nodes come and go: `engines.py` plays it for 1,000 nodes.

    python benchmarks/engines_record.py [--only slurm|ray]

A service with pilots, one without, and one on Ray each run jobs on four nodes of this machine, while a node is
drained, one is killed, and they come back. After each event, once the service has settled, everything is kept that its
adapter reads: the text of `squeue` and `sinfo`, what nodes wrote into the pool's folder, and Ray's nodes and placement
groups; beside it, which nodes the service had then. Goes to `benchmarks/recorded/`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engines import TOOLS, Asked, Served, load_tool
from measure import today

from pollux.backends.slurm.commands import SlurmCommands
from pollux.backends.slurm.script import pool_name

RECORDED = Path(__file__).with_name("recorded")
NODES, GPUS = 4, 4
WAITS = "import time; time.sleep(3600)"


def keep(engine: str, version: str, stories: dict[str, list[dict[str, Any]]]) -> None:
    """Write what was recorded of an engine."""
    kept = {"engine": engine, "version": version, "nodes": NODES, "gpus": GPUS, "date": today(), "stories": stories}
    RECORDED.mkdir(exist_ok=True)
    (RECORDED / f"{engine}.json").write_text(json.dumps(kept, indent=1) + "\n")
    print(f"{engine} {version}: {', '.join(f'{name} {len(said)}' for name, said in stories.items())}", flush=True)


def fill(served: Served) -> None:
    """A job over two nodes, and one beside it."""
    served.submit("wide", [sys.executable, "-c", WAITS], 2 * GPUS)
    served.submit("small", [sys.executable, "-c", WAITS], 1)
    served.until(lambda: all(job["state"] == "running" for job in served.jobs()))


def slurm_story(cluster: Any, home: Path, more: list[str]) -> list[dict[str, Any]]:
    """What Slurm and its nodes said to one service; each moment with the nodes that the service had."""
    given: dict[str, Any] = {} if more else {"nodes": NODES}
    given |= {"gpus_per_node": GPUS, "cpus_per_node": 4, "time_limit": "60:00", "poll_seconds": 1}
    given |= {"head": "127.0.0.1", "pool": home / "pool", "partition": "main"}
    words = ["--backend", "slurm", "--slots", str(GPUS)]
    words += [word for option, value in given.items() for word in ("--option", f"{option}={value}")]
    calls = SlurmCommands(os.environ, 60.0)
    story: list[dict[str, Any]] = []

    def note(event: str, is_so: Callable[[], bool], unseen: tuple[str, ...] = ()) -> None:
        """`unseen`: nodes whose death the service knows by its heartbeat, and Slurm not yet."""
        served.until(is_so)
        notes = {path.name: path.read_text() for path in (home / "pool" / "pilots").iterdir() if path.suffix != ".log"}
        squeue = calls.jobs(pool_name(home / "pool"))
        names = sorted({name for row in squeue.splitlines() for name in cluster.nodes if f"|{name}|" in row})
        sinfo = calls.all_nodes("main") if more else calls.nodes(names)
        told = {"squeue": squeue, "sinfo": sinfo, "notes": notes}
        story.append({"event": event, "nodes": served.nodes(), "unseen": unseen, **told})
        print(f"slurm: {event}: {' '.join(served.nodes())}", flush=True)

    served = Served(home, [*words, *more])
    try:
        everybody = sorted(cluster.nodes)
        served.until(lambda: served.nodes() == everybody)
        fill(served)
        note("two jobs run", lambda: served.nodes() == everybody)
        # Without pilots, a node of a batch job over several stays in it as long as the others are needed.
        (killed,) = next(job["placement"] for job in served.jobs() if job["id"] == "small")
        drained = next(node for node in everybody if node != killed)
        cluster.run("scontrol", "update", f"NodeName={drained}", "State=DRAIN", "Reason=fan")
        note("a node is drained", lambda: drained not in served.nodes())
        cluster.run("scontrol", "update", f"NodeName={drained}", "State=RESUME")
        note("it is back", lambda: served.nodes() == everybody)
        cluster.kill_node(killed)
        note("a node dies", lambda: killed not in served.nodes(), (killed,))
        cluster.start_node(killed)
        note("it is back, too", lambda: served.nodes() == everybody)
    finally:
        served.down()
        cluster.run("scancel", "--user=root")
        cluster.wait_for(lambda: not cluster.run("squeue", "-h"), "empty queue")
    return story


def record_slurm() -> None:
    """Both modes, on one cluster."""
    tool = load_tool()
    wrong = tool.missing()
    if wrong:
        raise SystemExit(wrong)
    with tempfile.TemporaryDirectory(prefix="pollux-record-", ignore_cleanup_errors=True) as name:
        os.chmod(name, 0o755)
        cluster = tool.SlurmCluster(Path(name) / "lab", nodes=NODES, gpus=GPUS, with_parent=True)
        os.environ.update(cluster.environ)
        os.environ.update(HOME=name, GLOO_SOCKET_IFNAME="lo", POLLUX_LEASE_SECONDS="6", POLLUX_LOST_SECONDS="8")
        try:
            cluster.start()
            pilots = slurm_story(cluster, Path(name) / "pilots", [])
            jobs = slurm_story(cluster, Path(name) / "jobs", ["--option", "mode=job"])
            version = cluster.run("sinfo", "--version").split()[-1]
        finally:
            cluster.stop()
    keep("slurm", version, {"pilots": pilots, "jobs": jobs})


def record_ray() -> None:
    """What Ray said; inside a namespace of its own."""
    if not os.environ.get("POLLUX_TEST_NAMESPACE"):
        words = [str(TOOLS / "ray" / "inside.sh"), sys.executable, __file__, "--only", "ray"]
        subprocess.run(words, check=True)
        return
    story: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="pollux-record-", ignore_cleanup_errors=True) as name, Asked(NODES) as ask:
        words = ["--backend", "ray", "--address", ask.address, "--option", "cpu_places=yes"]
        served = Served(Path(name) / "home", words)

        def note(event: str, is_so: Callable[[], bool]) -> None:
            served.until(is_so)
            # Without the names of sockets, which are paths of this machine.
            rows = [{name: row[name] for name in row if "Socket" not in name} for row in ask(do="nodes")]
            groups = ask(do="groups")
            story.append({"event": event, "nodes": served.nodes(), "rows": rows, "groups": groups})
            print(f"ray: {event}: {' '.join(served.nodes())}", flush=True)

        try:
            served.until(lambda: len(served.nodes()) == NODES)
            fill(served)
            note("two jobs run", lambda: True)
            goes = next(row["NodeID"] for row in story[-1]["rows"] if served.nodes()[0].endswith(row["NodeID"][-6:]))
            ask(do="kill", node=goes)
            note("a node dies", lambda: len(served.nodes()) == NODES - 1)
            ask(do="add")
            note("another comes", lambda: len(served.nodes()) == NODES)
            served.until(lambda: not next(row for row in ask(do="nodes") if row["NodeID"] == goes)["Alive"])
            note("Ray has seen the death", lambda: True)
        finally:
            served.down()
    keep("ray", importlib.metadata.version("ray"), {"cluster": story})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("slurm", "ray"), help="one engine")
    arguments = parser.parse_args()
    for engine, record in (("slurm", record_slurm), ("ray", record_ray)):
        if arguments.only in (None, engine):
            record()


if __name__ == "__main__":
    main()
