"""Jobs on nodes that any engine lends: their shims run beside the service, their replicas on the nodes.

An engine's backend is this one with that engine's provider. `node_daemon` runs on the nodes. How losses are noticed is
described in `docs/design/0008-fleet.md`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pollux.backends.dispatch.dispatcher import Dispatcher, ShimSettings
from pollux.backends.dispatch.shim_backend import ShimBackend, can_be_warm, seconds_from, seconds_of_hang
from pollux.backends.dispatch.slots import FleetSlotAllocator
from pollux.backends.fleet.node_watch import NodeWatch
from pollux.backends.fleet.shared_folders import SharedFolders
from pollux.backends.nodes.provider import LentNode, NodeProvider
from pollux.backends.process import replica_env
from pollux.backends.process.network import is_loopback, own_address
from pollux.backends.protocol import Launch
from pollux.core import Node
from pollux.core.errors import BackendFailed, InvalidInput
from pollux.storage.state_file import create_state, read_state

__all__ = ["LEASE_SECONDS", "LOST_SECONDS", "FleetBackend", "fleet_secret"]

LEASE_SECONDS = 10.0
"""A node ends the replicas of a job whose shim has been silent for this time."""

LOST_SECONDS = 12.0
"""Replicas on a node that is silent for this time are lost; longer than the lease, so that nothing runs twice."""


class FleetBackend(ShimBackend):
    """Runs jobs on the nodes of a provider; several objects, one after another, may work in the same `home`.

    `head`: the address by which nodes reach this machine; None: detected. `lease_seconds` and `lost_seconds`: None for
    POLLUX_LEASE_SECONDS and POLLUX_LOST_SECONDS, or 10 and 12. `warm` and `hang_seconds` as for the local backend.
    """

    def __init__(
        self,
        home: Path,
        provider: NodeProvider,
        name: str = "fleet",
        head: str | None = None,
        warm: bool = True,
        hang_seconds: float | None = None,
        lease_seconds: float | None = None,
        lost_seconds: float | None = None,
    ) -> None:
        self.name = name
        lease = seconds_from("POLLUX_LEASE_SECONDS", LEASE_SECONDS) if lease_seconds is None else lease_seconds
        lost = seconds_from("POLLUX_LOST_SECONDS", LOST_SECONDS) if lost_seconds is None else lost_seconds
        if not 0 < lease < lost:
            raise InvalidInput(
                f"the lease is {lease:g} s and a node is lost after {lost:g} s: give more for the second, so that "
                "nothing runs twice (POLLUX_LEASE_SECONDS, POLLUX_LOST_SECONDS)"
            )
        home = Path(home).absolute()
        self._provider = provider
        self._slots = FleetSlotAllocator(provider, fleet_secret(home), head or own_address(), lease, lost)
        self._shared = SharedFolders(self._slots.secret)
        self._watch = NodeWatch(home, self._slots, provider, self._shared)
        self._reports_to = ""
        settings = ShimSettings(replica_env.inherited(os.environ), can_be_warm(warm), seconds_of_hang(hang_seconds))
        super().__init__(
            home,
            Dispatcher(home, self._slots, settings, self._watch),
            lambda launch, is_change: _check_placement(launch, self._slots.nodes(), is_change),
        )
        self._watch.log(self.warnings)

    @property
    def head(self) -> str:
        """The address by which nodes reach this machine."""
        return self._slots.head

    @classmethod
    def head_of(cls, options: Mapping[str, Any]) -> str:
        """The address in the options, else this machine's address for others."""
        return str(options.get("head") or own_address())

    def reports_go_to(self, url: str) -> None:
        """Note the URL that agents report to, to warn about nodes that cannot reach it."""
        self._reports_to = url

    def inventory(self) -> tuple[Node, ...]:
        """The nodes whose daemon is up and answers."""
        return self._watch.nodes()

    def warnings(self) -> tuple[str, ...]:
        """One sentence for each thing that does not work fully now: silent nodes, and the provider's warnings."""
        silent = tuple(f"{why}; it is not used until it answers" for why in self._watch.suspects.values())
        alarms = self._watch.node_alarms
        told = (f"{alarms} nodes were given up and answered later; raise POLLUX_LOST_SECONDS",) if alarms else ()
        deaf = _report_warnings(self._reports_to, self.head, self._slots.hosts.values())
        return (*silent, *told, *deaf, *self._provider.warnings())

    def refuses(self, folders: Sequence[str]) -> str:
        """Why a job with these folders cannot run on the nodes: one of the folders is not shared with them."""
        up = [lent for node, lent in self._slots.hosts.items() if self._provider.is_up(node)]
        return self._shared.refuses(folders, up)

    def desire(self, num_nodes: int, awaited: bool = False) -> None:
        """Tell an engine that scales how many nodes could be used; `awaited`: a job without GPUs waits for some."""
        self._provider.desire(num_nodes, awaited)


def _check_placement(launch: Launch, there: Sequence[Node], is_change: bool) -> None:
    """Raise BackendFailed for an impossible placement."""
    if not launch.placement:
        raise BackendFailed(f"job '{launch.job_id}' has an empty placement: name nodes")
    if is_change:
        # If a node has just gone, the running job goes on, and the dispatcher reports the resize as refused.
        return
    nodes = {node.id: node for node in there}
    for node, count in launch.placement:
        if node not in nodes:
            known = ", ".join(sorted(nodes)[:8]) + (", ..." if len(nodes) > 8 else "") or "none at all"
            why = f"there is no node '{node}'; nodes now: {known}"
        elif count > nodes[node].num_gpus:
            why = f"'{node}' has {nodes[node].num_gpus} places"
        else:
            continue
        raise BackendFailed(f"job '{launch.job_id}' cannot be placed at '{launch.placement}': {why}")


def _report_warnings(url: str, head: str, hosts: Iterable[LentNode]) -> tuple[str, ...]:
    """A warning where agents on other machines are told to report to a loopback address."""
    if not is_loopback(urlsplit(url).hostname or ""):
        return ()
    far = [
        f"'{hosted.node.id}' ({hosted.address[0]})"
        for hosted in hosts
        if not is_loopback(hosted.address[0]) and hosted.address[0] not in (head, own_address())
    ]
    if not far:
        return ()
    return (
        f"jobs on node {far[0]}{f' and {len(far) - 1} more' if len(far) > 1 else ''} cannot report, so they train "
        f"but do not adapt: the service listens at {url}, for this machine only; start it with --host "
        f"{head}, and --tls-cert and --tls-key or --insecure-bind",
    )


def fleet_secret(home: Path) -> bytes:
    """The secret of the fleet of this home, made at the first call; 32 bytes."""
    path = Path(home) / "run" / "fleet.secret"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Of several processes the first one wins.
        with contextlib.suppress(FileExistsError):
            create_state(path, secrets.token_hex(32).encode())
        secret = bytes.fromhex((read_state(path) or b"").decode())
        if len(secret) == 32 and not stat.S_IMODE(path.stat().st_mode) & 0o077:
            return secret
        why = "it is no file of 32 bytes in hexadecimal that only its owner can read"
    except (OSError, ValueError) as error:
        why = str(error)
    raise BackendFailed(f"the fleet's secret at {path} cannot be used: {why}; remove it, or set POLLUX_HOME")
