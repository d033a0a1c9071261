"""Parses the output of Slurm's commands strictly: lists of nodes, times, rows of squeue and sinfo. Pure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from pollux.core.errors import BackendFailed

__all__ = [
    "ALL_NODES_FORMAT",
    "JOB_STATES",
    "NODE_STATES",
    "NOT_RESPONDING",
    "SINFO_FORMAT",
    "SQUEUE_FORMAT",
    "NodeRow",
    "PilotRow",
    "Stand",
    "expand_nodes",
    "fold_nodes",
    "gres_count",
    "gres_type",
    "read_grace",
    "read_nodes",
    "read_pilots",
    "read_seconds",
    "unknown_states",
]

SQUEUE_FORMAT = "%i|%T|%L|%l|%N|%k|%r"
"""Id, state, time left, time limit, nodes, comment, reason: the reason is last, as it alone is free text."""

SINFO_FORMAT = "%N|%T|%G|%o|%c|%E"
"""Node, state, generic resources, address, CPUs, reason."""

ALL_NODES_FORMAT = "NodeList:80|,StateLong:24|,Gres:160|,NodeAddr:160|,CPUs:8|,GresUsed:160|,CPUsState:32|,Reason:120"
"""The same with the resources in use, for `sinfo -O`: `-o` has no letter for them."""

Stand = Literal["waiting", "held", "leaving", "gone"]
"""What a state in Slurm means for a pilot: it has no nodes yet, has nodes, is about to lose them, or has lost them."""

JOB_STATES: Mapping[str, Stand] = {
    "BOOT_FAIL": "gone",
    "CANCELLED": "gone",
    "COMPLETED": "gone",
    # After a scancel, a time limit or the grace of a preemption, while KillWait still runs.
    "COMPLETING": "leaving",
    "CONFIGURING": "waiting",
    "DEADLINE": "gone",
    "EXPEDITING": "waiting",
    "FAILED": "gone",
    "LAUNCH_FAILED": "leaving",
    # For a node that Slurm does not reach, or that was set to DOWN: its processes may run on.
    "NODE_FAIL": "gone",
    "OUT_OF_MEMORY": "gone",
    "PENDING": "waiting",
    "POWER_UP_NODE": "waiting",
    "PREEMPTED": "gone",
    "RECONFIG_FAIL": "leaving",
    "REQUEUED": "waiting",
    "REQUEUE_FED": "waiting",
    "REQUEUE_HOLD": "waiting",
    "RESIZING": "held",
    "RESV_DEL_HOLD": "waiting",
    "REVOKED": "gone",
    "RUNNING": "held",
    # While a signal is sent, such as the notice of a preemption: milliseconds, or longer where a slurmd is slow.
    "SIGNALING": "held",
    "SPECIAL_EXIT": "waiting",
    "STAGE_OUT": "leaving",
    "STOPPED": "leaving",
    "SUSPENDED": "leaving",
    "TIMEOUT": "gone",
    # A flag beside any state: it says nothing of the processes.
    "UPDATE_DB": "held",
}
"""Every state that squeue prints, base states and flags, of Slurm 20.11 to 25.11; any other one is `leaving`.

`gone` is only what Slurm says. The connection to a host (`remote_launcher`) shows whether the host has ended.
"""

NODE_STATES: Mapping[str, Stand] = {
    **dict.fromkeys(
        (
            "alloc", "allocated", "blocked", "comp", "completing", "idle", "mix", "mixed", "planned", "plnd",
            "reserved", "resv", "unk", "unknown",
        ),
        "held",
    ),
    **dict.fromkeys(
        (
            "cancel_reboot", "down", "drain", "drained", "draining", "drng", "error", "fail", "failg", "failing",
            "future", "futr", "inval", "maint", "no_respond", "npc", "perfctrs", "pow_dn", "pow_up", "power_down",
            "power_up", "powered_down", "powering_down", "powering_up", "reboot", "reboot_issued", "reboot_requested",
        ),
        "leaving",
    ),
}  # fmt: skip
"""Every state that sinfo prints of a node, without its flags; any other one is `leaving`.

No state is `gone`: Slurm calls a node down if it does not reach it, but its host may still answer, and jobs save.
"""

NOT_RESPONDING = "*"
"""The mark that Slurm appends to the state of a node that does not answer it."""

_STATE = re.compile(r"[A-Z][A-Z0-9_]*")
_SETTING = re.compile(r"(\w+)=(\S*)")
# The idle CPUs in `allocated/idle/other/total`.
_CPUS = re.compile(r"\d+/(\d+)/\d+/\d+")
_NODE_STATE = re.compile(r"[a-z][a-z_+]*")
_JOB_ID = re.compile(r"[0-9]+(?:_[0-9]+)?")
_LEFT = re.compile(r"(?:(?P<days>\d+)-)?(?:(?:(?P<hours>\d+):)?(?P<minutes>\d+):)?(?P<seconds>\d+)")
_UNLIMITED = frozenset({"UNLIMITED", "NOT_SET", "INVALID", "N/A", "Partition_Limit", ""})
_NODE_WORD = re.compile(r"(?:[^,\[\]\s]|\[[^\[\]]*\])+")
_NODE_LIST = re.compile(rf"{_NODE_WORD.pattern}(?:,{_NODE_WORD.pattern})*")
_BRACKET = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_MOST_NODES = 100_000
# The marks that Slurm appends to a node's state: not responding, powering up or down, reserved, planned and the like.
_FLAGS = "*~#!%$@^-+"


_Row = TypeVar("_Row")


@dataclass(frozen=True, slots=True)
class PilotRow:
    """A job of ours in the queue. `seconds_left`, `limit_seconds`: None where there is no limit, or none yet."""

    id: str
    state: str
    seconds_left: float | None
    limit_seconds: float | None
    nodes: tuple[str, ...]
    comment: str
    reason: str

    @property
    def stand(self) -> Stand:
        """What its state means, see `JOB_STATES`; a job without nodes that has not ended waits for some."""
        stand = JOB_STATES.get(self.state, "leaving")
        return stand if self.nodes or stand == "gone" else "waiting"

    @property
    def is_waiting(self) -> bool:
        """Whether it has no nodes yet."""
        return self.stand == "waiting"

    @property
    def is_held(self) -> bool:
        """Whether it has its nodes, and its processes run."""
        return self.stand == "held"

    @property
    def has_nodes(self) -> bool:
        """Whether its processes may run: it is held or leaving."""
        return self.stand in ("held", "leaving")

    @property
    def has_ended(self) -> bool:
        """Whether it has no nodes any more, according to Slurm."""
        return self.stand == "gone"


@dataclass(frozen=True, slots=True)
class NodeRow:
    """One node as Slurm sees it. `stand`: `held`, or `leaving` if no job may start there; `reason`: for people.

    `used` (in the form of `gres`) and `idle_cpus`: resources in use, and left; empty and None where not asked for.
    """

    name: str
    state: str
    stand: Stand
    gres: str
    reason: str
    address: str = ""
    cpus: float = 0.0
    used: str = ""
    idle_cpus: float | None = None


def read_pilots(text: str) -> tuple[list[PilotRow], list[str]]:
    """The rows of `squeue -h -r -o SQUEUE_FORMAT`, and the lines that cannot be read."""
    return _read_rows(text, _pilot)


def read_nodes(text: str, with_use: bool = False) -> tuple[dict[str, NodeRow], list[str]]:
    """The rows of `sinfo -h -N -o SINFO_FORMAT` by node, and the lines that cannot be read; a node may come twice.

    `with_use`: the rows of `sinfo -h -N -O ALL_NODES_FORMAT`.
    """
    rows, odd = _read_rows(text, _node_with_use if with_use else _node)
    return {row.name: row for row in rows}, odd


def _read_rows(text: str, read: Callable[[str], _Row | None]) -> tuple[list[_Row], list[str]]:
    rows: list[_Row] = []
    odd: list[str] = []
    for line in text.splitlines():
        row = read(line)
        if row is not None:
            rows.append(row)
        elif line.strip():
            odd.append(line)
    return rows, odd


def _pilot(line: str) -> PilotRow | None:
    fields = line.split("|", 6)
    if len(fields) != 7:
        return None
    job_id, state, left, limit, nodes, comment, reason = (field.strip() for field in fields)
    if not _JOB_ID.fullmatch(job_id) or not _STATE.fullmatch(state):
        return None
    try:
        seconds, most, names = read_seconds(left), read_seconds(limit), expand_nodes(nodes)
    except BackendFailed:
        return None
    comment = "" if comment == "(null)" else comment
    return PilotRow(job_id, state, seconds, most, names, comment, "" if reason == "None" else reason)


def _node(line: str) -> NodeRow | None:
    fields = [field.strip() for field in line.split("|", 5)]
    return _node_from(fields) if len(fields) == 6 else None


def _node_with_use(line: str) -> NodeRow | None:
    fields = [field.strip() for field in line.split("|", 7)]
    if len(fields) != 8:
        return None
    used, cpus = fields.pop(5), fields.pop(5)
    row, found = _node_from(fields), _CPUS.fullmatch(cpus)
    return None if row is None or found is None else replace(row, used=used, idle_cpus=float(found.group(1)))


def _node_from(fields: list[str]) -> NodeRow | None:
    name, state, gres, address, cpus, reason = fields
    plain = _plain(state)
    if not (_NAME.fullmatch(name) and cpus.isdigit() and _NODE_STATE.fullmatch(plain)):
        return None
    why = "" if reason == "none" else reason
    return NodeRow(name, state, NODE_STATES.get(plain, "leaving"), gres, why, address, float(cpus))


def _plain(state: str) -> str:
    """A node's state without its flags. A node that does not answer Slurm may answer us, and we ask more often."""
    return state.rstrip(_FLAGS).lower()


def unknown_states(pilots: Iterable[PilotRow], nodes: Iterable[NodeRow]) -> list[str]:
    """The states of these rows that no table here has, as a newer Slurm may print them."""
    found = {row.state for row in pilots if row.state not in JOB_STATES}
    return sorted(found | {row.state for row in nodes if _plain(row.state) not in NODE_STATES})


def read_grace(config: str, partitions: str, partition: str) -> float | None:
    """Seconds between SIGTERM and SIGKILL on that partition (or several, with commas), empty for the default one.

    From `scontrol show config` and `scontrol -o show partition`: KillWait, and for partitions that can be preempted
    their GraceTime before it. None where KillWait is missing.
    """
    kill_wait = re.search(r"^KillWait\s*=\s*(\d+)", config, re.MULTILINE)
    if kill_wait is None:
        return None
    # With other plug-ins a QOS has the grace, or there is no preemption.
    is_preempted = re.search(r"^PreemptType\s*=\s*preempt/partition_prio", config, re.MULTILINE) is not None
    rows = [dict(_SETTING.findall(line)) for line in partitions.splitlines()]
    names = set(partition.split(",")) if partition else set()
    ours = [row for row in rows if (row.get("PartitionName") in names if names else row.get("Default") == "YES")]
    graces = [int(row["GraceTime"]) for row in ours if row.get("GraceTime", "").isdigit()]
    return float(kill_wait.group(1)) + (min(graces, default=0) if is_preempted else 0)


def read_seconds(text: str) -> float | None:
    """A time as Slurm writes it, `[[days-]hours:]minutes:seconds`; None where there is no limit."""
    if text in _UNLIMITED:
        return None
    found = _LEFT.fullmatch(text)
    if found is None:
        raise BackendFailed(f"Slurm wrote the time '{text}', which is none; is the format of its commands changed?")
    parts = {name: int(value or 0) for name, value in found.groupdict().items()}
    return float(((parts["days"] * 24 + parts["hours"]) * 60 + parts["minutes"]) * 60 + parts["seconds"])


def expand_nodes(text: str) -> tuple[str, ...]:
    """The nodes of a list such as `gpu[1-3,07],login`, in order; BackendFailed for what is no list of nodes."""
    if not text or text in ("(null)", "None"):
        return ()
    found: list[str] = []
    if not _NODE_LIST.fullmatch(text):
        raise BackendFailed(f"Slurm wrote '{text[:200]}', which is no list of nodes")
    for word in _NODE_WORD.findall(text):
        pieces = _BRACKET.split(word)
        fixed, ranges = pieces[0::2], [_numbers(inner, text) for inner in pieces[1::2]]
        for chosen in itertools.product(*ranges):
            found.append("".join(itertools.chain(*itertools.zip_longest(fixed, chosen, fillvalue=""))))
        if len(found) > _MOST_NODES:
            raise BackendFailed(f"Slurm wrote a list of more than {_MOST_NODES} nodes: '{text[:80]}'")
    if any(not _NAME.fullmatch(name) for name in found):
        raise BackendFailed(f"Slurm wrote '{text[:200]}', which is no list of nodes")
    return tuple(found)


def _numbers(inner: str, text: str) -> list[str]:
    numbers: list[str] = []
    for part in inner.split(","):
        found = _RANGE.fullmatch(part.strip())
        if found is None:
            raise BackendFailed(f"Slurm wrote '{text[:200]}', which is no list of nodes")
        first, last = found.group(1), found.group(2) or found.group(1)
        if int(last) - int(first) >= _MOST_NODES:
            raise BackendFailed(f"Slurm wrote a list of more than {_MOST_NODES} nodes: '{text[:80]}'")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def fold_nodes(names: Iterable[str]) -> str:
    """The names as one list for a command line, with numbers at their ends as ranges."""
    groups: dict[tuple[str, int], list[int]] = {}
    plain: list[str] = []
    for name in sorted(set(names)):
        found = re.fullmatch(r"(.*?)([0-9]+)", name)
        if found is None:
            plain.append(name)
        else:
            groups.setdefault((found.group(1), len(found.group(2))), []).append(int(found.group(2)))
    for (prefix, width), numbers in groups.items():
        inner = _ranges(sorted(numbers), width)
        plain.append(f"{prefix}[{inner}]" if len(numbers) > 1 else f"{prefix}{inner}")
    return ",".join(plain)


def _ranges(numbers: list[int], width: int) -> str:
    parts: list[str] = []
    for _, group in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        ends = [str(run[0]).zfill(width)] if len(run) == 1 else [str(run[0]).zfill(width), str(run[-1]).zfill(width)]
        parts.append("-".join(ends))
    return ",".join(parts)


def gres_type(gres: str) -> str:
    """The type of the GPUs in `gpu:a100:4(S:0-1),...`; empty where none is named."""
    found = re.search(r"(?:^|,)gpu:([A-Za-z][^:,(]*):\d+", gres)
    return found.group(1) if found else ""


def gres_count(gres: str, kind: str = "") -> int:
    """The number of GPUs in `gpu:a100:4(S:0-1)`, of that type or of all types; 0 for none.

    Newer versions write `gpu:(null):4` where no type is named.
    """
    counts = re.findall(r"(?:^|,)gpu(?::([A-Za-z][^:,(]*)|:\(null\))?:(\d+)", gres)
    return sum(int(count) for name, count in counts if not kind or name == kind)
