"""What Slurm's commands print, read strictly: lists of nodes, times, rows of squeue and sinfo. Nothing is run here."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass

from pollux.core.errors import BackendFailed

__all__ = [
    "ALL_NODES_FORMAT",
    "ENDED_STATES",
    "NOT_RESPONDING",
    "SINFO_FORMAT",
    "SQUEUE_FORMAT",
    "NodeRow",
    "PilotRow",
    "expand_nodes",
    "fold_nodes",
    "gres_count",
    "gres_type",
    "read_nodes",
    "read_pilots",
    "read_seconds",
]

SQUEUE_FORMAT = "%i|%T|%L|%l|%N|%k|%r"
"""Id, state, time left, time limit, nodes, comment, reason: the reason last, since it is the one free text."""

SINFO_FORMAT = "%N|%T|%G|%o|%c|%E"
"""Node, state, generic resources, address, CPUs, reason."""

ALL_NODES_FORMAT = "NodeList:80|,StateLong:24|,Gres:160|,NodeAddr:160|,CPUs:8|,GresUsed:160|,CPUsState:32|,Reason:120"
"""The same with what of a node is used, for `sinfo -O`: no letter of `-o` stands for the resources in use."""

ENDED_STATES = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    }
)
"""States of a job that holds nothing any more."""

NOT_RESPONDING = "*"
"""What Slurm appends to the state of a node that does not answer it."""

_LEAVING_STATES = frozenset({"COMPLETING", "STAGE_OUT", "SIGNALING", "STOPPED", "SUSPENDED", "RESIZING"})
_WAITING_STATES = frozenset(
    {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
)
_KNOWN_STATES = ENDED_STATES | _LEAVING_STATES | _WAITING_STATES | {"RUNNING"}
_JOB_ID = re.compile(r"[0-9]+(?:_[0-9]+)?")
_LEFT = re.compile(r"(?:(?P<days>\d+)-)?(?:(?:(?P<hours>\d+):)?(?P<minutes>\d+):)?(?P<seconds>\d+)")
_UNLIMITED = frozenset({"UNLIMITED", "NOT_SET", "INVALID", "N/A", "Partition_Limit", ""})
_NODE_WORD = re.compile(r"(?:[^,\[\]\s]|\[[^\[\]]*\])+")
_NODE_LIST = re.compile(rf"{_NODE_WORD.pattern}(?:,{_NODE_WORD.pattern})*")
_BRACKET = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_MOST_NODES = 100_000
# What Slurm appends to a node's state: not responding, powering up or down, reserved, planned and the like.
_FLAGS = "*~#!%$@^-+"
# Which states keep a job on its node for good; everything else that is known is on the way out.
_WELL = frozenset({"allocated", "mixed", "idle", "completing", "planned", "reserved", "blocked", "unknown", "unk"})
_LEAVING = frozenset({"draining", "drained", "drng", "drain", "failing", "maint", "inval", "perfctrs", "reboot"})


@dataclass(frozen=True, slots=True)
class PilotRow:
    """One job of ours in the queue. `seconds_left`, `limit_seconds`: None where there is no limit, or none yet."""

    id: str
    state: str
    seconds_left: float | None
    limit_seconds: float | None
    nodes: tuple[str, ...]
    comment: str
    reason: str

    @property
    def is_waiting(self) -> bool:
        """Whether it was not granted anything yet."""
        return self.state in _WAITING_STATES

    @property
    def is_running(self) -> bool:
        """Whether its nodes are its own, and its processes run."""
        return self.state == "RUNNING"

    @property
    def has_ended(self) -> bool:
        """Whether it holds nothing any more."""
        return self.state in ENDED_STATES


@dataclass(frozen=True, slots=True)
class NodeRow:
    """One node as Slurm sees it: `well`, `leaving` (drained: nothing new, ends soon) or `down`; `reason` for people.

    `used` (as `gres`) and `idle_cpus` are what others have taken and left; empty and None where that was not asked.
    """

    name: str
    state: str
    verdict: str
    gres: str
    reason: str
    address: str = ""
    cpus: float = 0.0
    used: str = ""
    idle_cpus: float | None = None


def read_pilots(text: str) -> tuple[list[PilotRow], list[str]]:
    """The rows of `squeue -h -r -o SQUEUE_FORMAT`, and the lines that are none."""
    rows: list[PilotRow] = []
    odd: list[str] = []
    for line in text.splitlines():
        if not line.strip():
            continue
        row = _pilot(line)
        if row is None:
            odd.append(line)
        else:
            rows.append(row)
    return rows, odd


def _pilot(line: str) -> PilotRow | None:
    fields = line.split("|", 6)
    if len(fields) != 7:
        return None
    job_id, state, left, limit, nodes, comment, reason = (field.strip() for field in fields)
    if not _JOB_ID.fullmatch(job_id) or state not in _KNOWN_STATES:
        return None
    try:
        seconds, most, names = read_seconds(left), read_seconds(limit), expand_nodes(nodes)
    except BackendFailed:
        return None
    comment = "" if comment == "(null)" else comment
    return PilotRow(job_id, state, seconds, most, names, comment, "" if reason == "None" else reason)


def read_nodes(text: str, with_use: bool = False) -> tuple[dict[str, NodeRow], list[str]]:
    """The rows of `sinfo -h -N -o SINFO_FORMAT` by node, and the lines that are none; a node may be there twice.

    `with_use`: those of `sinfo -h -N -O ALL_NODES_FORMAT`.
    """
    rows: dict[str, NodeRow] = {}
    odd: list[str] = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split("|", 7 if with_use else 5)]
        if not line.strip():
            continue
        used, idle = (fields.pop(5), _idle_cpus(fields.pop(5))) if with_use and len(fields) == 8 else ("", None)
        whole = len(fields) == 6 and _NAME.fullmatch(fields[0]) and fields[4].isdigit()
        whole = whole and (idle is not None) is with_use
        verdict = _verdict(fields[1]) if whole else ""
        if not verdict:
            odd.append(line)
            continue
        name, state, gres, address, cpus, reason = fields
        why = "" if reason == "none" else reason
        rows[name] = NodeRow(name, state, verdict, gres, why, address, float(cpus), used, idle)
    return rows, odd


def _idle_cpus(text: str) -> float | None:
    """Of `allocated/idle/other/total`; None for what is none."""
    found = re.fullmatch(r"\d+/(\d+)/\d+/\d+", text)
    return float(found.group(1)) if found else None


def _verdict(state: str) -> str:
    """`well`, `leaving` or `down`; empty for a state that is not known."""
    plain = state.rstrip(_FLAGS).lower()
    if not re.fullmatch(r"[a-z_]+", plain):
        return ""
    if plain in _LEAVING:
        return "leaving"
    if plain in _WELL:
        # It may not answer, or not have answered a controller that just started: our own heartbeat is the faster one.
        return "well"
    return "down" if plain.startswith(("down", "fail", "power", "future", "error")) else ""


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
    """`gpu[1-3,07],login` in full, in order; BackendFailed for what is no list of nodes."""
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
    """The names as one list for a command line, numbers at the end folded into ranges."""
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
    """How many GPUs `gpu:a100:4(S:0-1)` has, of that type, or over all types; 0 for none.

    Where no type is named newer ones write `gpu:(null):4`.
    """
    counts = re.findall(r"(?:^|,)gpu(?::([A-Za-z][^:,(]*)|:\(null\))?:(\d+)", gres)
    return sum(int(count) for name, count in counts if not kind or name == kind)
