"""Runs in a pilot's step on a node: reports what the node has, keeps its host running, and reports Slurm's signals.

The batch script in `script` starts it. The host is the node daemon (`node_daemon`), which runs replicas.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pollux.backends.node_daemon.command import daemon_words, has_replicas
from pollux.backends.process.devices import check_lent, find_devices
from pollux.backends.process.network import meeting_variables
from pollux.core.errors import BackendFailed
from pollux.storage.state_file import create_state, folder_fault, read_state, write_state

__all__ = ["CLOSED", "Where", "address_towards", "facts_of", "main", "without_slurm"]

_LOOK_SECONDS = 5.0
_LAST_LOOKS_SECONDS = 0.2
_END_SECONDS = 10.0
_CLOSED_SECONDS = 60.0
_OF_THE_STEP = ("SLURM_", "SRUN_", "SBATCH_", "PMI_", "PMI2_", "PMIX_")
_KEPT = frozenset({"SLURM_CONF", "SLURM_JOB_ID", "SLURM_CLUSTER_NAME"})

CLOSED = "closed"
"""The first word of the pulse after the service has gone down."""

_EVERYWHERE = "0.0.0.0"


@dataclass(frozen=True, slots=True)
class Where:
    """Where a node's host listens: an address, and the port where one is fixed. `meet`: where replicas meet.

    `reached`: the address by which the service reaches the host; empty where the service reads it from the host.
    """

    listen: str
    meet: str
    reached: str = ""


def facts_of(environ: Mapping[str, str], gpus: int, slots: int) -> dict[str, Any]:
    """What this node lends, from Slurm's variables and the driver; BackendFailed where the two do not agree.

    `gpus`: how many GPUs were asked for on the node; `slots`: how many CPU slots instead, 0 for none.
    """
    cpus, memory = environ.get("SLURM_CPUS_ON_NODE", ""), environ.get("SLURM_MEM_PER_NODE", "")
    facts: dict[str, Any] = {
        "places": slots or gpus,
        "gpus": [],
        "gpu_type": "cpu" if slots else "",
        "cpus": float(cpus) if cpus.isdigit() else float(len(os.sched_getaffinity(0))),
        "memory_bytes": float(memory) * 2**20 if memory.isdigit() else 0.0,
    }
    if slots:
        return facts
    facts["gpus"] = _gpus_given(environ.get("CUDA_VISIBLE_DEVICES", ""), gpus)
    found = find_devices(None, {})
    doubt = check_lent(found, facts["gpus"], "Slurm", "have an administrator look at it")
    if doubt:
        print(f"warning: {doubt}", flush=True)
    if not found.is_cpu:
        facts["gpu_type"] = found.node.gpu_type
    return facts


def _gpus_given(listed: str, asked: int) -> list[int]:
    """As many GPUs as were asked for, out of those that Slurm lists for the step."""
    words = [word.strip() for word in listed.split(",") if word.strip()]
    if not all(word.isdigit() for word in words):
        raise BackendFailed(f"Slurm gave the GPUs '{listed}', by names and not by numbers (MIG?): those cannot be used")
    if len(words) < asked:
        raise BackendFailed(f"{asked} GPUs were asked for, and Slurm gave '{listed}': check the node's gres.conf")
    return [int(word) for word in words[:asked]]


def without_slurm(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for replicas, without Slurm's variables: frameworks would take replicas for tasks of a step."""
    return {name: value for name, value in environ.items() if name in _KEPT or not name.startswith(_OF_THE_STEP)}


def address_towards(head: str) -> str:
    """The address of this machine on its way to `head`, by which `head` can reach it."""
    family = socket.AF_INET6 if ":" in head else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((head, 9))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise BackendFailed(
            f"the service's machine '{head}' has no address seen from here ({error.strerror}); give head=ADDRESS"
        ) from None


class _Node:
    """The host of this node, as a child process, and the files about it in the pool's folder."""

    def __init__(self, folder: Path, pilot: str, name: str) -> None:
        self._folder = folder
        self._pilot = pilot
        self.name = name
        self.is_taken_back = False

    def claim_name(self) -> str:
        """Take the node's name, and return it; with the pilot's name added where another pilot has this node, too."""
        names = self._folder / "names"
        names.mkdir(parents=True, exist_ok=True)
        try:
            create_state(names / self.name, self._pilot.encode())
        except FileExistsError:
            if read_state(names / self.name) not in (None, self._pilot.encode()):
                return f"{self.name}.{self._pilot.replace('_', '-')}"
        return self.name

    def free_name(self) -> None:
        """Free the node's name for the next pilot on this node."""
        name = self._folder / "names" / self.name
        with contextlib.suppress(OSError):
            if read_state(name) == self._pilot.encode():
                name.unlink()

    def note(self, what: str, text: str) -> None:
        """Write a file about this node, whole or not at all."""
        write_state(self._path(what), text.encode(), durable=False)

    def note_leaving(self, number: int, _: object) -> None:
        """Report that Slurm announced the end; go on until it comes, or until the jobs here have saved and ended."""
        self.is_taken_back = self.is_taken_back or number == signal.SIGTERM
        with contextlib.suppress(OSError):
            self.note("leaving", signal.Signals(number).name)

    def start(self, facts: Mapping[str, Any], where: Where, warm: bool) -> subprocess.Popen[bytes]:
        """Start the node daemon, with everything imported if `warm`.

        It ends with this process, which holds its input open.
        """
        if fault := folder_fault(self._folder):
            raise BackendFailed(
                f"the secret in {self._folder} is not used: {fault}; give another folder with pool=FOLDER"
            )
        announce = self._path("json")
        words = daemon_words(self.claim_name(), facts["places"], where.listen, announce, facts["gpus"], warm)
        words += ["--patient", "--secret-file", str(self._folder / "secret")]
        self.note("facts", json.dumps({**facts, "address": where.reached}))
        environ = without_slurm(os.environ)
        environ |= meeting_variables(where.meet, environ)
        return subprocess.Popen([sys.executable, *words], stdin=subprocess.PIPE, env=environ)

    def read_pulse(self) -> str:
        """The text of the file that the service rewrites every few seconds; empty where it cannot be read."""
        return (read_state(self._folder / "pulse") or b"").decode(errors="replace")

    def _path(self, what: str) -> Path:
        return self._folder / "pilots" / f"{self._pilot}.{self.name}.{what}"


def _where(head: str, ports: str, name: str) -> Where:
    """Listen at the address on the way to `head`; where `ports` has this node, the service uses its Slurm address.

    The two differ on nodes with several networks, and a name may mean another address here: then the host listens on
    all networks. It refuses every caller that does not know the secret.
    """
    meet = address_towards(head)
    for word in ports.split(","):
        known, _, port = word.rpartition(":")
        node, _, address = known.partition("=")
        if word and node == name:
            reached = address or node
            listen = meet if reached == meet or ":" in meet else _EVERYWHERE
            return Where(f"[{listen}]:{port}" if ":" in listen else f"{listen}:{port}", meet, reached)
    return Where(meet, meet)


def _keep(node: _Node, host: subprocess.Popen[bytes], orphan_seconds: float) -> int:
    """Wait for the host's end; or end an idle host when Slurm takes the node back, or no service came for long."""
    pulse, seen = node.read_pulse(), time.monotonic()
    patience = orphan_seconds
    while True:
        try:
            return _wait(node, host)
        except subprocess.TimeoutExpired:
            if node.is_taken_back:
                if not has_replicas(host.pid):
                    return _end(host)
                continue
            now = node.read_pulse()
            if now != pulse or has_replicas(host.pid):
                pulse, seen = now, time.monotonic()
            # The wait is shorter after a service that ended properly than after one that may have crashed.
            patience = min(orphan_seconds, _CLOSED_SECONDS) if now.startswith(CLOSED) else orphan_seconds
        if time.monotonic() - seen > patience:
            print(f"no work, and no service for {patience:g} s: this node is given back", flush=True)
            return _end(host)


def _wait(node: _Node, host: subprocess.Popen[bytes]) -> int:
    """The host's exit code; TimeoutExpired after some seconds, or soon where Slurm takes the node back."""
    until = time.monotonic() + _LOOK_SECONDS
    while not node.is_taken_back and time.monotonic() < until - _LAST_LOOKS_SECONDS:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return host.wait(_LAST_LOOKS_SECONDS)
    return host.wait(_LAST_LOOKS_SECONDS)


def _end(host: subprocess.Popen[bytes]) -> int:
    assert host.stdin is not None
    host.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        host.wait(_END_SECONDS)
    host.kill()
    host.wait()
    return 0


def main() -> int:
    """Run the host of this node; returns the exit code."""
    parser = argparse.ArgumentParser(description="The host of a node lent by Slurm.")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--pilot", required=True)
    parser.add_argument("--head", required=True)
    parser.add_argument("--gpus-per-node", type=int, default=0)
    parser.add_argument("--slots", type=int, default=0)
    parser.add_argument("--orphan-seconds", type=float, default=900.0)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument(
        "--ports", default="", help="node=address:port of hosts, as in node1=10.0.0.1:20001,node2:20002"
    )
    given = parser.parse_args()
    node = _Node(given.folder, given.pilot, os.environ.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0])
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, node.note_leaving)
    try:
        facts = facts_of(os.environ, given.gpus_per_node, given.slots)
        host = node.start(facts, _where(given.head, given.ports, node.name), not given.cold)
    except BackendFailed as error:
        node.note("problem", str(error))
        print(f"error: {error}", flush=True)
        return BackendFailed.exit_code
    try:
        return _keep(node, host, given.orphan_seconds)
    finally:
        node.free_name()


if __name__ == "__main__":
    sys.exit(main())
