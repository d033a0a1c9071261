"""Nodes lent by Slurm: pilot jobs whose nodes are the pool, grown and given back as they are needed.

`pilot_provider` keeps the pilots; jobs run on their nodes as on any other lent nodes (`pollux.backends.fleet`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

from pollux.backends.fleet.backend import FleetBackend
from pollux.backends.slurm.commands import SlurmCommands
from pollux.backends.slurm.job_provider import SlurmJobProvider
from pollux.backends.slurm.job_requests import job_script
from pollux.backends.slurm.pilot_provider import SlurmPilotProvider
from pollux.backends.slurm.script import JOB_MODE, SlurmOptions, array_words, batch_script
from pollux.core.errors import BackendFailed

__all__ = ["SlurmBackend"]

_COMMANDS = ("sbatch", "squeue", "sinfo", "scancel")
# The first version with `srun --overlap`, which runs hosts beside the batch script.
_OLDEST = (20, 11)
_VERSION_SECONDS = 10.0
# Variables that users set for all their jobs, and that Slurm does not set inside a job.
_OF_THE_SHELL = {
    "partition": "SBATCH_PARTITION",
    "account": "SBATCH_ACCOUNT",
    "qos": "SBATCH_QOS",
    "time_limit": "SBATCH_TIMELIMIT",
}


class SlurmBackend(FleetBackend):
    """Runs jobs on nodes of a Slurm cluster; `asked` are the fields of `SlurmOptions`.

    `pool`: a folder that this machine and the nodes share; None: one below the user's home folder, for this `home`.
    `head`, `lease_seconds` and `lost_seconds` as for every fleet.
    """

    options_class: ClassVar[type | None] = SlurmOptions

    def __init__(
        self,
        home: Path,
        pool: Path | None = None,
        head: str | None = None,
        lease_seconds: float | None = None,
        lost_seconds: float | None = None,
        **asked: Any,
    ) -> None:
        options = _options(asked)
        provider = SlurmJobProvider if options.mode == JOB_MODE else SlurmPilotProvider
        self._slurm = provider(_pool(home, pool), options)
        super().__init__(
            home, self._slurm, "slurm", head, options.warm, lease_seconds=lease_seconds, lost_seconds=lost_seconds
        )

    @property
    def notice_seconds(self) -> float:
        """How long before a pilot's time limit jobs leave its node: they have that time to save."""
        return self._slurm.options.margin_seconds

    @property
    def taken_back_seconds(self) -> float | None:
        """The time between Slurm's SIGTERM and SIGKILL: KillWait, and for a preemption the partition's GraceTime."""
        return self._slurm.queue.grace_seconds

    @classmethod
    def missing(cls) -> str:
        """See `BackendCapabilities.missing`."""
        absent = [command for command in _COMMANDS if shutil.which(command) is None]
        if absent:
            return (
                f"Slurm's commands are not here (no {', '.join(absent)} in PATH): run the service on a login node of "
                "the cluster, or install its client packages (Debian: slurm-client)"
            )
        # A Slurm without a readable version may work all the same: if it does not, the first round shows why.
        with contextlib.suppress(BackendFailed):
            found = re.search(
                r"\b(\d+)\.(\d+)\S*", SlurmCommands(os.environ, _VERSION_SECONDS).run(["sbatch", "--version"])
            )
            if found is not None and (int(found.group(1)), int(found.group(2))) < _OLDEST:
                return f"Slurm {found.group()} is here, and 20.11 or newer is needed: have an administrator update it"
        return ""

    @classmethod
    def preview(cls, home: Path, **given: Any) -> str:
        """The command that asks for the fewest nodes, and its script, exactly as they would be sent.

        Without pilots: the command for a job named JOB on a node named NODE.
        """
        known = {field.name for field in fields(SlurmOptions)}
        options = _options({name: value for name, value in given.items() if name in known})
        pool, head = _pool(home, given.get("pool")), cls.head_of(given)
        if options.mode == JOB_MODE:
            words = " ".join(array_words(1))
            script = job_script(options, pool, head, "JOB", ["NODE"])
        else:
            words = " ".join(array_words(max(options.least_nodes, 1)))
            script = batch_script(options, pool, head)
        return f"{words} <<'END'\n{script}END\n"


def _options(given: Mapping[str, Any]) -> SlurmOptions:
    """The options; those not given come from the user's variables for sbatch, which are hidden from sbatch itself."""
    shell = {name: os.environ.get(variable, "") for name, variable in _OF_THE_SHELL.items()}
    missing = {name: value for name, value in shell.items() if value and not given.get(name)}
    return SlurmOptions(**{**given, **missing, **({"nodes": str(given["nodes"])} if "nodes" in given else {})})


def _pool(home: Path, pool: Path | None) -> Path:
    """The folder that service and nodes share: by default below the user's home folder, which clusters share."""
    if pool is not None:
        return Path(pool).absolute()
    return Path.home() / ".pollux-slurm" / hashlib.sha256(str(Path(home).absolute()).encode()).hexdigest()[:10]
