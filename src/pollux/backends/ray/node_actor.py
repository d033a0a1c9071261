"""The parts that run on the nodes of a Ray cluster: the actor that keeps a node's host, and the task that finds a GPU.

The host is the node daemon. Ray gets both by name, so the package must be installed on every node.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pollux.backends.node_daemon.command import daemon_words, has_replicas
from pollux.backends.process.devices import check_lent, find_devices
from pollux.backends.process.network import meeting_variables
from pollux.core.errors import BackendFailed
from pollux.wire.live.codec import MalformedValue, from_plain, to_plain

__all__ = ["ActorReport", "HostOptions", "NodeHost", "found_gpus", "secret_digest"]

_START_SECONDS = 120.0
_POLL_SECONDS = 0.02
_WATCH_SECONDS = 300.0
_WATCH_POLL_SECONDS = 0.1
# A driver asks again every `_WATCH_SECONDS`. The wait for the next driver is shorter if the last called `release`.
_ORPHAN_SECONDS = 900.0
_PARTED_SECONDS = 60.0
_IDLE_CHECK_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class HostOptions:
    """The options of a host; one that was started with others is not used."""

    places: int
    with_gpus: bool
    warm: bool

    def __str__(self) -> str:
        return f"places={self.places}, with_gpus={self.with_gpus}, warm={self.warm}"


@dataclass(frozen=True, slots=True)
class ActorReport:
    """What the driver must know of a host: where it listens, a `doubt` about its GPUs, and whether it `works`.

    It goes through Ray as plain values, since the actor may be of another version of Pollux.
    """

    address: str
    port: int
    gpus: tuple[int, ...]
    doubt: str
    options: HostOptions
    works: bool
    secret: str

    @classmethod
    def read(cls, said: object) -> ActorReport | None:
        """The report of an actor; None for what an actor of another version says."""
        try:
            return from_plain(cls, said)
        except MalformedValue:
            return None


def secret_digest(secret: str) -> str:
    """A digest that shows whether two secrets are the same, and tells neither."""
    return hashlib.sha256(secret.encode()).hexdigest()[:16]


def found_gpus() -> list[str]:
    """The GPUs that Ray gave to the calling task, as Ray names them on its node."""
    ray: Any = importlib.import_module("ray")
    return [str(found) for found in ray.get_runtime_context().get_accelerator_ids().get("GPU", [])]


def _visible() -> list[int] | None:
    """The GPUs that Ray was started with on the node; None for all. Ray hides them from processes that claim none."""
    try:
        entries = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    listed = [entry.partition(b"=")[2].decode() for entry in entries if entry.startswith(b"CUDA_VISIBLE_DEVICES=")]
    words = [word.strip() for word in listed[-1].split(",")] if listed and listed[-1] else []
    return [int(word) for word in words] if words and all(word.isdigit() for word in words) else None


def _compare(gpus: list[int]) -> str:
    """A doubt about the GPUs that Ray lends, or empty; BackendFailed where their driver does not show all of them."""
    found = find_devices(None, {})
    remedy = f"start Ray on it with --num-gpus={len(found.gpus)}"
    if found.why_none:
        remedy = f"see what nvidia-smi says on it, or {remedy}"
    return check_lent(found, gpus, "Ray", remedy)


def _free_groups(prefix: str, node_id: str) -> None:
    """Remove the placement groups of a service on a node; a group's name ends with the node's name and a number."""
    ray: Any = importlib.import_module("ray")
    for row in ray.util.placement_group_table().values():
        name = str(row["name"])
        if name.startswith(prefix) and name.split(":")[-2] == node_id and row["state"] != "REMOVED":
            ray.util.remove_placement_group(ray.util.get_placement_group(name))


def _end_actor() -> None:
    ray: Any = importlib.import_module("ray")
    ray.kill(ray.get_runtime_context().current_actor)


class NodeHost:
    """Starts the host of its node as a child and keeps it; the host ends when this actor ends, for whatever reason.

    `with_gpus` False: the places are CPU slots, whatever Ray calls them. `warm`: with everything imported beforehand.
    `prefix`: the beginning of the names of the service's placement groups. If the host has no work and no driver asks
    for it, host and actor end after a while, and the groups on the node are removed.
    """

    def __init__(
        self, node_id: str, places: int, listen: str, secret: str, with_gpus: bool, warm: bool, prefix: str = ""
    ) -> None:
        self._node_id, self._prefix = node_id, prefix
        self._options = HostOptions(places, with_gpus, warm)
        self._secret = secret_digest(secret)
        visible = _visible()
        gpus = (visible if visible is not None and len(visible) >= places else list(range(places)))[:places]
        self._gpus = gpus if with_gpus else []
        self._doubt = _compare(self._gpus)
        self._folder = Path(tempfile.mkdtemp(prefix="pollux-host-"))
        self._announce = self._folder / "announce.json"
        words = [sys.executable, "-P", *daemon_words(node_id, places, listen, self._announce, self._gpus, warm)]
        hidden = ("RAY_", "POLLUX_", "CUDA_VISIBLE_DEVICES")
        environ = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
        environ |= meeting_variables(listen, environ)
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, env={**environ, "POLLUX_FLEET_SECRET": secret}, start_new_session=True
        )
        # Ray lowers the priority of its workers (RAY_worker_niceness); only root may raise it again for their children.
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self._process.pid, 0)
        self._note_call(_ORPHAN_SECONDS)
        threading.Thread(target=self._end_when_idle, daemon=True, name="pollux-idle").start()

    def _note_call(self, patience_seconds: float) -> None:
        self._patience, self._asked_at = patience_seconds, time.monotonic()

    def _end_when_idle(self) -> None:
        """End host and actor once there was neither work nor a call for too long.

        Otherwise the service's claims on this node would stay, and other Ray jobs would wait for ever.
        """
        while time.monotonic() - self._asked_at <= self._patience:
            time.sleep(_IDLE_CHECK_SECONDS)
            if self._process.poll() is None and has_replicas(self._process.pid):
                self._asked_at = time.monotonic()
        self._clear()
        self._process.wait()
        if self._prefix:
            try:
                _free_groups(self._prefix, self._node_id)
            except Exception as error:
                print(f"the placement groups of {self._prefix} stay: {error}", file=sys.stderr, flush=True)
        _end_actor()

    def _clear(self) -> None:
        """Close the host's input, which ends it, and remove its folder."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def release(self) -> None:
        """Wait for the next service for a short time only: this one ends, and nothing runs."""
        self._note_call(_PARTED_SECONDS)

    async def report(self) -> dict[str, Any]:
        """The `ActorReport` as plain values, once the host listens; BackendFailed where it does not start."""
        self._note_call(_ORPHAN_SECONDS)
        deadline = time.monotonic() + _START_SECONDS
        while not self._announce.exists():
            code = self._process.poll()
            if code is not None:
                raise BackendFailed(f"its host ended at once with code {code}; Ray's log of the actor has the reason")
            if time.monotonic() > deadline:
                raise BackendFailed(f"its host was not up after {_START_SECONDS:g} s; see Ray's log of the actor")
            await asyncio.sleep(_POLL_SECONDS)
        said = json.loads(self._announce.read_text(encoding="utf-8"))
        report = ActorReport(
            said["address"], said["port"], tuple(self._gpus), self._doubt, self._options,
            has_replicas(self._process.pid), self._secret,
        )  # fmt: skip
        plain: dict[str, Any] = to_plain(report)
        return plain

    async def watch(self) -> int | None:
        """Wait for the end of the host; its exit code, or None if it still runs after a while.

        The calling driver may have ended by then, and Ray does not cancel its call: the wait must end.
        """
        self._note_call(_ORPHAN_SECONDS)
        deadline = time.monotonic() + _WATCH_SECONDS
        while (code := self._process.poll()) is None:
            if time.monotonic() > deadline:
                return None
            await asyncio.sleep(_WATCH_POLL_SECONDS)
        self._clear()
        return code
