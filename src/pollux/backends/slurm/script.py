"""The options of pilots, checked once, and the exact batch script that is sent to Slurm. Pure."""

from __future__ import annotations

import hashlib
import math
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pollux.backends.slurm.parse import gres_count, read_seconds
from pollux.core.errors import InvalidInput, UnknownName

__all__ = ["JOB_MODE", "PILOT_COMMENT", "SlurmOptions", "array_words", "batch_script", "node_range", "pool_name"]

PILOT_COMMENT = "pilot"
"""The comment of a pilot's Slurm job; in the mode without pilots the comment names Pollux's job instead."""

JOB_MODE = "job"
_MODES = ("pilot", JOB_MODE)
_TIME = re.compile(r"\d+|\d+:\d+(:\d+)?|\d+-\d+(:\d+){0,2}|UNLIMITED", re.IGNORECASE)
_WORD = re.compile(r"[A-Za-z0-9_.,:+@/=-]+")
_MOST_PILOTS = 1000
_ONE_NODE = "1"
# Options that the script sets itself, and relies on.
_OURS = (
    "--array", "--job-name", "--comment", "--output", "--signal", "--requeue", "--no-requeue", "--nodes", "--nodelist",
    "--ntasks", "--ntasks-per-node", "--wrap", "--clusters", "--gres", "--parsable",
)  # fmt: skip
# The short forms of these options.
_OURS_IN_SHORT = ("-a", "-J", "-o", "-N", "-w", "-n", "-M")


def node_range(text: str) -> tuple[int, int]:
    """The fewest and the most nodes to hold, from a text such as `4` or `2..8`."""
    found = re.fullmatch(r"\s*(\d+)\s*(?:\.\.\s*(\d+)\s*)?", str(text))
    least, most = (int(found.group(1)), int(found.group(2) or found.group(1))) if found else (0, 0)
    if found is None or most < 1 or least > most or most > _MOST_PILOTS:
        raise InvalidInput(f"nodes is '{text}': give a number of nodes such as 4, or a range such as 1..8, to 1000")
    return least, most


_Rule = tuple[tuple[str, ...], Callable[[Any], object], str]
_RULES: tuple[_Rule, ...] = (
    (
        ("partition", "account", "qos", "gres", "memory"),
        lambda value: not value or _WORD.fullmatch(value),
        "Slurm takes no such word; give letters, digits and .,:_-",
    ),
    (
        ("time_limit",),
        lambda value: not value or _TIME.fullmatch(value),
        "give it as sbatch takes it, such as 4:00:00 or 2-0",
    ),
    (
        ("gpus_per_node", "slots", "cpus_per_node"),
        lambda value: not isinstance(value, bool) and 0 <= value <= 4096,
        "give a whole number from 1 to 4096, or leave it out",
    ),
    (
        ("margin_seconds", "poll_seconds", "command_seconds", "orphan_seconds", "wait_seconds"),
        lambda value: 0 < value < math.inf,
        "give a finite number of seconds above 0",
    ),
    (
        ("ahead_seconds", "idle_seconds"),
        lambda value: 0 <= value < math.inf,
        "give a finite number of seconds, 0 or more",
    ),
)
"""The options with the same check: what must be true of each, and the remedy where it is not."""


@dataclass(frozen=True, slots=True)
class SlurmOptions:
    """How Slurm is asked for nodes; empty strings leave a choice to the cluster. `docs/slurm.md` explains each.

    `nodes`: how many to hold, a number or a range such as `1..8`. Each node is asked for `gpus_per_node` GPUs, or for
    `gres` word for word, or lends `slots` CPU slots instead of GPUs. `mode`: `pilot`; or `job`, without pilots: each
    generation of a job asks for the nodes that it lacks, and waits `wait_seconds` for them while others are free.
    `words`: more options for sbatch; `setup`: a line of shell before Python on the node; `python`: the interpreter
    there. Jobs leave a node `margin_seconds` before its pilot's time limit; the next pilot is asked for `ahead_seconds`
    before that. Surplus nodes are kept for `idle_seconds`; a node without work ends `orphan_seconds` after it last saw
    the service.
    """

    nodes: str = _ONE_NODE
    partition: str = ""
    account: str = ""
    qos: str = ""
    time_limit: str = ""
    gpus_per_node: int = 0
    gres: str = ""
    slots: int = 0
    cpus_per_node: int = 0
    memory: str = ""
    words: str = ""
    setup: str = ""
    python: str = sys.executable
    mode: str = "pilot"
    preemptible: bool = False
    warm: bool = True
    margin_seconds: float = 180.0
    ahead_seconds: float = 600.0
    idle_seconds: float = 300.0
    orphan_seconds: float = 900.0
    wait_seconds: float = 60.0
    poll_seconds: float = 5.0
    command_seconds: float = 20.0

    def __post_init__(self) -> None:
        for check in _CHECKS:
            check(self)

    @property
    def least_nodes(self) -> int:
        """The fewest nodes to hold."""
        return node_range(self.nodes)[0]

    @property
    def most_nodes(self) -> int:
        """The most nodes to hold."""
        return node_range(self.nodes)[1]

    @property
    def places(self) -> int:
        """The number of GPUs or CPU slots on each node."""
        return self.slots or self.gpus_per_node

    @property
    def cpus(self) -> int:
        """CPUs asked for on each node, by default one for each slot; 0 leaves their number to the cluster."""
        return self.cpus_per_node or self.slots

    @property
    def request(self) -> str:
        """The generic resources asked for on each node; empty for none."""
        return self.gres or (f"gpu:{self.gpus_per_node}" if self.gpus_per_node else "")


def _check_values(options: SlurmOptions) -> None:
    """Check each value by itself."""
    node_range(options.nodes)
    if options.mode not in _MODES:
        raise UnknownName("mode", options.mode, _MODES)
    for names, is_good, remedy in _RULES:
        for name in names:
            value = getattr(options, name)
            if not is_good(value):
                shown = f"'{value}'" if isinstance(value, str) else value
                raise InvalidInput(f"{name} is {shown}: {remedy}")


def _check_time_limit(options: SlurmOptions) -> None:
    is_exact = re.fullmatch(r"[\d-]*\d+:\d+:\d+", options.time_limit)
    limit = read_seconds(options.time_limit) if is_exact else None
    if limit is not None and limit <= options.margin_seconds:
        raise InvalidInput(
            f"time_limit is {options.time_limit}, and nodes are left {options.margin_seconds:g} s before it: give a "
            "longer time_limit, or a smaller margin_seconds"
        )


def _check_resources(options: SlurmOptions) -> None:
    if not (options.gpus_per_node or options.slots):
        beside = f" beside gres={options.gres}" if options.gres else ""
        raise InvalidInput(
            f"Slurm must be asked for something: give --option gpus_per_node=N{beside}, or --slots N for CPU slots"
        )
    asked = gres_count(options.gres)
    if options.gpus_per_node and asked and asked != options.gpus_per_node:
        raise InvalidInput(
            f"gres '{options.gres}' and gpus_per_node {options.gpus_per_node} name different numbers of GPUs "
            "for a node; give one of the two"
        )


def _check_mode(options: SlurmOptions) -> None:
    if options.mode == JOB_MODE and options.nodes != _ONE_NODE:
        raise InvalidInput(
            f"nodes is '{options.nodes}', which is for pilots: with mode=job Slurm is asked for what jobs need; leave "
            "it out, or limit jobs by the quotas of their queues"
        )


def _check_words(options: SlurmOptions) -> None:
    try:
        words = shlex.split(options.words)
    except ValueError as error:
        raise InvalidInput(f"words is '{options.words}', which cannot be split into words: {error}") from None
    for word in words:
        if "\n" in word or not word.startswith("-"):
            raise InvalidInput(f"words holds '{word}': give sbatch options as --name=value, such as --nice=100")
        if _is_ours(word):
            raise InvalidInput(f"words holds '{word}', which Pollux sets itself; leave it out")
    if "\n" in options.setup:
        raise InvalidInput("setup holds a line break: join commands with ';'")


_CHECKS = (_check_values, _check_time_limit, _check_resources, _check_mode, _check_words)


def _is_ours(word: str) -> bool:
    """Whether the script sets this option of sbatch itself; sbatch also takes short and abbreviated forms."""
    if word.startswith("--"):
        name = word.partition("=")[0]
        return len(name) > 2 and any(ours.startswith(name) for ours in _OURS)
    return word[:2] in _OURS_IN_SHORT


def pool_name(folder: Path) -> str:
    """The name of all Slurm jobs of the pool in this folder, by which they are found."""
    return f"pollux-{hashlib.sha256(str(folder).encode()).hexdigest()[:10]}"


def array_words(count: int, exclude: str = "") -> list[str]:
    """The command that submits `count` pilots at once, not on the nodes `exclude`; its input is the script."""
    words = ["sbatch", "--parsable", f"--array=0-{count - 1}"]
    return [*words, f"--exclude={exclude}"] if exclude else words


def batch_script(
    options: SlurmOptions,
    folder: Path,
    head: str,
    comment: str = PILOT_COMMENT,
    nodelist: str = "",
    nodes: int = 1,
    ports: Mapping[str, int] | None = None,
) -> str:
    """The script of one pilot, which runs the host in a step on each of its nodes. `folder`: the pool's.

    `nodelist`: the names of the nodes, `nodes` of them; `ports`: where their hosts listen, by the node's name (or
    `name=address`, where Slurm has another address of it), None for any free port.
    """
    optional = {
        "--nodelist": nodelist,
        "--gres": options.request,
        "--cpus-per-task": options.cpus,
        "--mem": options.memory,
        "--partition": options.partition,
        "--account": options.account,
        "--qos": options.qos,
        "--time": options.time_limit,
    }
    lines = [
        f"--job-name={pool_name(folder)}",
        f"--comment={shlex.quote(comment)}",
        f"--nodes={nodes}",
        "--ntasks-per-node=1",
        *(f"{name}={value}" for name, value in optional.items() if value),
        # The service would not know a requeued pilot; it asks for another one instead.
        "--no-requeue",
        "--no-kill",
        # A signal in case squeue does not answer. Slurm may send it a minute early: the queue's times are better.
        f"--signal=B:USR1@{max(1, round(options.margin_seconds / 2))}",
        f"--output={shlex.quote(f'{folder}/pilots/%A_%a.log')}",
        "--open-mode=append",
        *(shlex.quote(word) for word in shlex.split(options.words)),
    ]
    header = "\n".join(f"#SBATCH {line}" for line in lines)
    return f"#!/bin/bash\n{header}\n{_body(options, folder, head, nodes, ports or {})}"


def _body(options: SlurmOptions, folder: Path, head: str, nodes: int, ports: Mapping[str, int]) -> str:
    gres = f" --gres={options.request}" if options.request else ""
    kind = f"--slots {options.slots}" if options.slots else f"--gpus-per-node {options.gpus_per_node}"
    cold = "" if options.warm else " --cold"
    listed = ",".join(f"{name}:{port}" for name, port in sorted(ports.items()))
    listen = f" --ports {shlex.quote(listed)}" if listed else ""
    setup = f"{options.setup}\n" if options.setup else ""
    return f"""\
pilot="${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID}}"
folder={shlex.quote(str(folder))}
[ -r "$folder/secret" ] || {{ echo "no $folder/secret on $(hostname): do nodes share the folder pool=?"; exit 1; }}
trap ': > "$folder/pilots/$pilot.-.leaving"' USR1 TERM
{setup}srun --overlap --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1{gres} --mem=0 --cpu-bind=none --no-kill \\
    --kill-on-bad-exit=0 --wait=0 --input=none \\
    {shlex.quote(options.python)} -m pollux.backends.slurm.node_main --folder "$folder" --pilot "$pilot" \\
    --head {shlex.quote(head)} {kind}{cold}{listen} --orphan-seconds {options.orphan_seconds:g} &
step=$!
code=129
while [ "$code" -gt 128 ] && kill -0 "$step" 2>/dev/null; do wait "$step"; code=$?; done
exit "$code"
"""
