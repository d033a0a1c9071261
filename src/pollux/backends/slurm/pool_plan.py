"""Decides from Slurm's queue which nodes to lend or leave, and which pilots to ask for or give back. Pure.

A node is lost once the view no longer lends it, or leaves it; `queue_view` reads the queue for that.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from pollux.backends.nodes.provider import LentNode
from pollux.backends.slurm.parse import NodeRow, PilotRow, gres_type
from pollux.backends.slurm.script import SlurmOptions
from pollux.core import Node

__all__ = ["ANNOUNCE_SECONDS", "GIVE_UP_SECONDS", "NodeNote", "PoolPlan", "PoolView", "plan_pool", "view_pool"]

ANNOUNCE_SECONDS = 90.0
"""A host that has not announced itself by this time after the start of its pilot is unlikely to do so."""

GIVE_UP_SECONDS = 600.0
"""After this time the first such pilot is given back; the next get longer, since a user's `setup` may take long."""

_MOST_AT_ONCE = 1000
_FROZEN = ("SUSPENDED", "STOPPED")
# A partition may grant less time than the margins in the options: then each is at most this part of what it grants.
_LARGEST_MARGIN = 0.9
_LARGEST_AHEAD = 0.5


@dataclass(frozen=True, slots=True)
class NodeNote:
    """What a node of a pilot has written into the shared folder; `id`: empty until its host is up.

    `problem`: why the node cannot be used; `is_leaving`: Slurm has told the node that its end is near.
    """

    id: str = ""
    address: tuple[str, int] = ("", 0)
    places: int = 0
    gpus: tuple[int, ...] = ()
    gpu_type: str = ""
    cpus: float = 0.0
    memory_bytes: float = 0.0
    problem: str = ""
    is_leaving: bool = False


_NOTHING = NodeNote()


@dataclass(frozen=True, slots=True)
class PoolView:
    """The pool at one moment: hosts that are up, hosts to be left (by id, with the reason), and warnings for people.

    `steady`: the pilots that count towards the wanted number; `pilot_of`: the pilot of each host. `faulty`: pilots to
    give back; `given_up`: those of them whose hosts never came.
    """

    hosts: tuple[LentNode, ...] = ()
    leaving: Mapping[str, str] = field(default_factory=dict)
    pilot_of: Mapping[str, str] = field(default_factory=dict)
    steady: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    faulty: tuple[str, ...] = ()
    given_up: tuple[str, ...] = ()
    bad_nodes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """How many pilots to submit, and which ones to cancel."""

    submit: int = 0
    cancel: tuple[str, ...] = ()


def view_pool(
    options: SlurmOptions,
    rows: Collection[PilotRow],
    states: Mapping[str, NodeRow],
    notes: Mapping[tuple[str, str], NodeNote],
    running_seconds: Mapping[str, float],
    give_up_seconds: float = GIVE_UP_SECONDS,
) -> PoolView:
    """The pool according to the queue, the states of nodes and the notes of nodes.

    `seconds_left` of the rows is that of now. `running_seconds`: how long each pilot has been seen running; a pilot
    without a host after `give_up_seconds` is faulty.
    """
    builder = _ViewBuilder(options, states, notes)
    for row in rows:
        builder.add(row)
    return builder.view(running_seconds, give_up_seconds)


class _ViewBuilder:
    """Makes the view from one row at a time."""

    def __init__(
        self, options: SlurmOptions, states: Mapping[str, NodeRow], notes: Mapping[tuple[str, str], NodeNote]
    ) -> None:
        self._options = options
        self._states = states
        self._notes = notes
        self._hosts: list[LentNode] = []
        self._leaving: dict[str, str] = {}
        self._pilot_of: dict[str, str] = {}
        self._steady: list[str] = []
        self._waiting: list[PilotRow] = []
        self._faulty: dict[str, str] = {}
        self._bad: list[str] = []
        self._silent: list[PilotRow] = []

    def add(self, row: PilotRow) -> None:
        """Add the nodes of a pilot."""
        if row.is_waiting:
            self._waiting.append(row)
        elif row.has_nodes:
            usable = [self._node(row, name) for name in row.nodes]
            if row.id not in self._faulty and any(usable) and not _expires(self._options, row):
                self._steady.append(row.id)
            if not any(self._note(row.id, name).id for name in row.nodes) and row.id not in self._faulty:
                self._silent.append(row)

    def _note(self, pilot: str, name: str) -> NodeNote:
        return self._notes.get((pilot, name), _NOTHING)

    def _node(self, row: PilotRow, name: str) -> bool:
        """Add one node of a pilot; whether it stays usable."""
        note, state = self._note(row.id, name), self._states.get(name)
        if note.problem:
            self._faulty[row.id] = f"node '{name}' cannot be used: {note.problem}"
            self._bad.append(name)
            return False
        why = _row_leaves(self._options, row) or _node_leaves(state, note, self._note(row.id, "-"))
        if note.id and note.id not in self._pilot_of:
            self._hosts.append(_lent_node(self._options, note, state))
            self._pilot_of[note.id] = row.id
            if why:
                self._leaving[note.id] = why
        return not why

    def view(self, running_seconds: Mapping[str, float], give_up_seconds: float) -> PoolView:
        """The view of all rows."""
        silent = [row for row in self._silent if running_seconds.get(row.id, 0.0) > ANNOUNCE_SECONDS]
        # A pilot that cannot be used must not count towards the wanted number.
        given_up = {row.id for row in silent if running_seconds[row.id] > give_up_seconds}
        silences = _silences(silent, running_seconds, give_up_seconds)
        said = [*self._faulty.values(), *silences, *_queue(self._waiting)]
        return PoolView(
            tuple(sorted(self._hosts, key=lambda hosted: _natural(hosted.node.id))),
            self._leaving,
            self._pilot_of,
            tuple(pilot for pilot in self._steady if pilot not in given_up),
            tuple(row.id for row in self._waiting),
            (*self._faulty, *sorted(given_up)),
            tuple(sorted(given_up)),
            tuple(self._bad),
            (*said, *_goings(self._leaving)),
        )


def _row_leaves(options: SlurmOptions, row: PilotRow) -> str:
    if row.state in _FROZEN:
        return "Slurm suspended its pilot"
    if not row.is_held:
        return f"Slurm has its pilot as {row.state}"
    if row.seconds_left is not None and row.seconds_left <= _margin(options, row):
        return "its pilot's time limit is near"
    return ""


def _expires(options: SlurmOptions, row: PilotRow) -> bool:
    """Whether it is time to ask for the next pilot."""
    if row.seconds_left is None:
        return False
    margin = _margin(options, row)
    rest = math.inf if row.limit_seconds is None else max(0.0, row.limit_seconds - margin)
    return row.seconds_left <= margin + min(options.ahead_seconds, _LARGEST_AHEAD * rest)


def _margin(options: SlurmOptions, row: PilotRow) -> float:
    limit = math.inf if row.limit_seconds is None else row.limit_seconds
    return min(options.margin_seconds, _LARGEST_MARGIN * limit)


def _node_leaves(state: NodeRow | None, note: NodeNote, batch: NodeNote) -> str:
    if note.is_leaving or batch.is_leaving:
        return "Slurm announced the end of its pilot"
    if state is not None and state.stand == "leaving":
        return f"Slurm has it as {state.state}{': ' + state.reason if state.reason else ''}"
    return ""


def _lent_node(options: SlurmOptions, note: NodeNote, state: NodeRow | None) -> LentNode:
    gpu_type = note.gpu_type or (gres_type(state.gres) if state is not None else "") or "gpu"
    node = Node(
        note.id,
        note.places,
        gpu_type,
        note.cpus or math.inf,
        note.memory_bytes or math.inf,
        preemptible=options.preemptible,
    )
    return LentNode(node, note.address, note.gpus)


def _natural(name: str) -> tuple[tuple[int, int | str], ...]:
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name) if part)


def _silences(silent: Collection[PilotRow], running_seconds: Mapping[str, float], give_up_seconds: float) -> list[str]:
    return [
        f"pilot {row.id} has run on {','.join(row.nodes)} for {running_seconds[row.id]:.0f} s, and its host has not "
        "announced itself: is the pool= on a file system that the node shares? See the pilot's log; it is given back "
        f"after {give_up_seconds:.0f} s"
        for row in silent
    ]


def _queue(waiting: Collection[PilotRow]) -> list[str]:
    reasons: dict[str, int] = {}
    for row in waiting:
        reasons[row.reason or "no reason given"] = reasons.get(row.reason or "no reason given", 0) + 1
    return [
        f"{count} node{'s' * (count != 1)} wait{'s' * (count == 1)} in Slurm's queue: {reason}"
        for reason, count in sorted(reasons.items())
    ]


def _goings(leaving: Mapping[str, str]) -> list[str]:
    return [f"node '{name}' is being left: {why}" for name, why in sorted(leaving.items())]


def plan_pool(
    options: SlurmOptions, pool: PoolView, wanted: int, in_use: Collection[str], may_submit: bool, may_shrink: bool
) -> PoolPlan:
    """The pilots to ask for, and to give back: idle ones that are to be left, faulty ones, and surplus ones.

    `in_use`: ids of hosts with work; `may_shrink`: there has been a surplus for long enough.
    """
    busy = {pool.pilot_of[host] for host in in_use if host in pool.pilot_of}
    left = {pool.pilot_of[host] for host in pool.leaving} - busy - set(pool.steady)
    cancel = [*sorted(left), *(pilot for pilot in pool.faulty if pilot not in left and pilot not in busy)]
    lacking = wanted - len(pool.steady) - len(pool.waiting)
    if lacking > 0:
        return PoolPlan(min(lacking, _MOST_AT_ONCE) if may_submit else 0, tuple(cancel))
    idle = [pilot for pilot in reversed(pool.steady) if pilot not in busy]
    surplus = [*pool.waiting, *idle] if may_shrink else []
    return PoolPlan(0, (*cancel, *surplus[: -lacking if lacking else 0]))
