"""Slurm's commands, each with a time limit: what they print, or why they did not. What it means is read elsewhere."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence

from pollux.backends._slurm_script import array_words
from pollux.backends._slurm_text import SINFO_FORMAT, SQUEUE_FORMAT, fold_nodes
from pollux.core.errors import BackendFailed

__all__ = ["SlurmCalls"]

_MOST_WORDS = 200
_REMEDIES = {
    "munge": "authentication is refused: is munge running here, with the cluster's key and a right clock?",
    "Invalid user": "this machine's user is not known to the cluster; run the service as one who may submit jobs",
    "association": "the account or partition is not yours: check account=, partition= and qos=",
    "Invalid account": "check account= and partition=: 'sacctmgr show associations' lists yours",
    "Invalid qos": "check qos=: 'sacctmgr show qos' lists them",
    "invalid partition": "check partition=: 'sinfo' lists them",
    "AssocMaxSubmitJobLimit": "your quota of jobs is used up; ask for fewer nodes=, or wait",
    "QOSMax": "your quota is used up; ask for fewer nodes=, or another qos=",
    "Requested node configuration is not available": "no node has so much: check gpus_per_node=, memory=, partition=",
    "time limit": "check time_limit= against the partition's: 'sinfo -o %P,%l' lists them",
    "slurm_load_jobs error": "is slurmctld up? 'scontrol ping' tells",
    "Unable to contact": "is slurmctld up? 'scontrol ping' tells",
}


class SlurmCalls:
    """The five commands that are needed. `seconds`: how long one may take before it is ended."""

    def __init__(self, environ: Mapping[str, str], seconds: float) -> None:
        # Inside an allocation these would turn every request into one for that allocation.
        self._environ = {
            name: value
            for name, value in environ.items()
            if name == "SLURM_CONF"
            or not name.startswith(("SLURM_", "SBATCH_", "SRUN_", "SQUEUE_", "SINFO_", "SCANCEL_"))
        }
        self._seconds = seconds

    def jobs(self, name: str) -> str:
        """All jobs of that name, those that ended lately too; one row for each element of an array."""
        words = ["squeue", "-h", "-r", "-t", "all", f"--user={os.getuid()}", f"--name={name}", "-o", SQUEUE_FORMAT]
        return self.run(words)

    def nodes(self, names: Sequence[str]) -> str:
        """The state of these nodes."""
        return self.run(["sinfo", "-h", "-N", f"--nodes={fold_nodes(names)}", "-o", SINFO_FORMAT])

    def all_nodes(self, partition: str) -> str:
        """The state of every node of a partition; of the cluster, where none is named."""
        where = [f"--partition={partition}"] if partition else []
        return self.run(["sinfo", "-h", "-N", *where, "-o", SINFO_FORMAT])

    def submit(self, script: str, count: int, exclude: Sequence[str] = ()) -> str:
        """Submit that many, not on the nodes `exclude`; the id of the array."""
        said = self.run(array_words(count, fold_nodes(exclude)), script).strip()
        found = re.fullmatch(r"(\d+)(?:;\S+)?", said.splitlines()[-1] if said else "")
        if found is None:
            raise BackendFailed(f"sbatch printed '{said[:200]}' instead of a job's number; see whether it was taken")
        return found.group(1)

    def cancel(self, ids: Sequence[str]) -> None:
        """Cancel these; those that ended do not matter."""
        for first in range(0, len(ids), _MOST_WORDS):
            self.run(["scancel", "--quiet", *ids[first : first + _MOST_WORDS]])

    def run(self, words: Sequence[str], given: str = "") -> str:
        """What a command prints; BackendFailed where it fails, is not there, or takes too long."""
        try:
            process = subprocess.Popen(
                list(words),
                env=self._environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            raise BackendFailed(
                f"'{words[0]}' cannot be run ({error.strerror}): install Slurm's client commands, or set PATH"
            ) from None
        try:
            said, complaint = process.communicate(given, timeout=self._seconds)
        except subprocess.TimeoutExpired:
            _kill(process)
            raise BackendFailed(
                f"'{words[0]}' did not answer within {self._seconds:g} s and was ended; is slurmctld up and reachable?"
            ) from None
        if process.returncode != 0:
            raise BackendFailed(_explain(words[0], process.returncode, complaint or said))
        return said


def _kill(process: subprocess.Popen[str]) -> None:
    """End a command with all it started; whoever still holds its output is not waited for."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=1.0)
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()


def _explain(command: str, code: int, complaint: str) -> str:
    lines = [line.strip() for line in complaint.splitlines() if line.strip()]
    last = lines[-1] if lines else "it said nothing"
    remedy = next((text for key, text in _REMEDIES.items() if key.lower() in complaint.lower()), "")
    return f"'{command}' failed with exit code {code}: {last}{'; ' + remedy if remedy else ''}"
