"""Nodes lent by Slurm: pilot jobs whose nodes are the pool, grown and given back as they are needed.

Here is what may be asked of it. `pilot_provider` looks after the pilots; jobs run on their nodes as on any other lent
ones (`pollux.backends.fleet`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from pollux.backends.fleet.backend import FleetBackend, own_address
from pollux.backends.slurm.commands import SlurmCalls
from pollux.backends.slurm.job_provider import SlurmJobLender, job_script
from pollux.backends.slurm.pilot_provider import SlurmLender
from pollux.backends.slurm.script import JOB_MODE, PilotOptions, array_words, batch_script
from pollux.core.errors import BackendFailed

__all__ = ["SlurmBackend", "missing"]

_COMMANDS = ("sbatch", "squeue", "sinfo", "scancel")
# The first with `srun --overlap`, which runs hosts beside the batch script.
_OLDEST = (20, 11)
_VERSION_SECONDS = 10.0
# Those that people set for all their jobs, and that Slurm does not set itself inside of one.
_OF_THE_SHELL = {
    "partition": "SBATCH_PARTITION",
    "account": "SBATCH_ACCOUNT",
    "qos": "SBATCH_QOS",
    "time_limit": "SBATCH_TIMELIMIT",
}


def missing() -> str:
    """What keeps this machine from using Slurm, and the remedy; empty where nothing does."""
    absent = [command for command in _COMMANDS if shutil.which(command) is None]
    if absent:
        return (
            f"Slurm's commands are not here (no {', '.join(absent)} in PATH): run the service on a login node of the "
            "cluster, or install its client packages (Debian: slurm-client)"
        )
    # One that cannot tell its version may work all the same: what is wrong with it shows in the first round.
    with contextlib.suppress(BackendFailed):
        found = re.search(r"\b(\d+)\.(\d+)\S*", SlurmCalls(os.environ, _VERSION_SECONDS).run(["sbatch", "--version"]))
        if found is not None and (int(found.group(1)), int(found.group(2))) < _OLDEST:
            return f"Slurm {found.group()} is here, and 20.11 or newer is needed: have an administrator update it"
    return ""


class SlurmBackend(FleetBackend):
    """Runs jobs on nodes of a Slurm cluster.

    `pool`: a folder that this machine and the nodes share; None: one below the user's own folder, for this `home`.
    `nodes`: how many to hold, a number or a range such as `1..8`. `gpus_per_node` GPUs are asked for on each, or `gres`
    word by word; `slots`: so many CPU slots on each node instead of GPUs. `mode` `job`: no pilots, each generation of a
    job asks for the nodes it lacks. `words` are further options for sbatch, `setup` is a line of shell before Python on
    a node, `python` the interpreter there. For `margin_seconds`, `ahead_seconds`, `idle_seconds`, `orphan_seconds` and
    `wait_seconds` see `docs/slurm.md`; the others as for sbatch or the fleet.
    """

    def __init__(
        self,
        home: Path,
        nodes: str = "1",
        partition: str = "",
        account: str = "",
        qos: str = "",
        time_limit: str = "",
        gpus_per_node: int = 0,
        gres: str = "",
        slots: int = 0,
        cpus_per_node: int = 0,
        memory: str = "",
        words: str = "",
        setup: str = "",
        python: str = sys.executable,
        mode: str = "pilot",
        preemptible: bool = False,
        margin_seconds: float = 180.0,
        ahead_seconds: float = 600.0,
        idle_seconds: float = 300.0,
        orphan_seconds: float = 900.0,
        wait_seconds: float = 60.0,
        poll_seconds: float = 5.0,
        command_seconds: float = 20.0,
        head: str | None = None,
        pool: Path | None = None,
        warm: bool = True,
        lease_seconds: float | None = None,
        lost_seconds: float | None = None,
    ) -> None:
        options = _options(
            nodes=str(nodes), partition=partition, account=account, qos=qos, time_limit=time_limit,
            gpus_per_node=gpus_per_node, gres=gres, slots=slots, cpus_per_node=cpus_per_node, memory=memory,
            words=words, setup=setup, python=python, mode=mode, preemptible=preemptible, warm=warm,
            margin_seconds=margin_seconds,
            ahead_seconds=ahead_seconds, idle_seconds=idle_seconds, orphan_seconds=orphan_seconds,
            wait_seconds=wait_seconds, poll_seconds=poll_seconds, command_seconds=command_seconds,
        )  # fmt: skip
        lender = SlurmJobLender if mode == JOB_MODE else SlurmLender
        self._slurm = lender(_pool(home, pool), options)
        super().__init__(home, self._slurm, "slurm", head, warm, lease_seconds=lease_seconds, lost_seconds=lost_seconds)

    @property
    def notice_seconds(self) -> float:
        """So long before a pilot's limit its nodes are left: jobs have that time to save."""
        return self._slurm.options.margin_seconds

    def refuses(self, folders: Sequence[str]) -> str:
        """Only hosts that are up can tell; the others are asked when a job is placed there."""
        there = [hosted for node, hosted in self._ground.hosts.items() if self._slurm.is_up(node)]
        return self._shared.refuses(folders, there)

    @property
    def taken_back_seconds(self) -> float | None:
        """What lies between Slurm's SIGTERM and SIGKILL: KillWait, and at a preemption the partition's GraceTime."""
        return self._slurm.grace_seconds

    @classmethod
    def preview(cls, home: Path, **given: Any) -> str:
        """The command that asks for the fewest nodes to hold, and its script, exactly as they would be sent.

        Without pilots: what a decision to run a job named JOB on a node named NODE would send.
        """
        known = {field.name for field in fields(PilotOptions)}
        options = _options(**{name: value for name, value in given.items() if name in known})
        pool, head = _pool(home, given.get("pool")), given.get("head") or own_address()
        if options.mode == JOB_MODE:
            words = " ".join(array_words(1))
            script = job_script(options, pool, head, "JOB", ["NODE"])
        else:
            words = " ".join(array_words(max(options.least_nodes, 1)))
            script = batch_script(options, pool, head)
        return f"{words} <<'END'\n{script}END\n"


def _options(**given: Any) -> PilotOptions:
    """What is not given is as the user's shell has it for sbatch, which does not see that: the script says it."""
    shell = {name: os.environ.get(variable, "") for name, variable in _OF_THE_SHELL.items()}
    return PilotOptions(**{**given, **{name: value for name, value in shell.items() if value and not given.get(name)}})


def _pool(home: Path, pool: Path | None) -> Path:
    """Where service and nodes meet: by default in the user's own folder, which clusters share; a home is local."""
    if pool is not None:
        return Path(pool).absolute()
    return Path.home() / ".pollux-slurm" / hashlib.sha256(str(Path(home).absolute()).encode()).hexdigest()[:10]
