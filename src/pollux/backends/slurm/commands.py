"""Runs Slurm's commands with a time limit, and returns what they print, or explains why they failed."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from pollux.backends.slurm.parse import ALL_NODES_FORMAT, SINFO_FORMAT, SQUEUE_FORMAT, fold_nodes
from pollux.backends.slurm.script import array_words
from pollux.core.errors import BackendFailed

__all__ = ["SlurmCommands"]

_MOST_WORDS = 200
_AUTHENTICATION = "authentication is refused: is munge running here, with the cluster's key and a right clock?"
_SHARED = "a limit that your account or QOS shares with others is reached; ask for fewer nodes=, or wait"
_QUOTA = "your quota is used up; ask for fewer nodes= or gpus_per_node=, or another account= or another qos="
# The first match counts: names of limits come before the words that all refusals for limits contain.
_REMEDIES = {
    "munge": _AUTHENTICATION,
    "authentication": _AUTHENTICATION,
    "Zero Bytes": f"slurmctld does not answer this machine; mostly {_AUTHENTICATION}",
    "WallDuration": "check time_limit= against your account's and QOS's: 'sacctmgr show associations' and 'show qos'",
    "AssocGrp": _SHARED,
    "QOSGrp": _SHARED,
    "QOSMin": "a job asks for less than the QOS takes: ask for more gpus_per_node= or cpus_per_node=, or another qos=",
    "SubmitJob": "your quota of jobs is used up; ask for fewer nodes=, or wait",
    "AssocMax": _QUOTA,
    "QOSMax": _QUOTA,
    "accounting/QOS policy": "a limit of your account or QOS: 'sacctmgr show associations' and 'show qos' list them",
    "Invalid user": "this machine's user is not known to the cluster; run the service as one who may submit jobs",
    "association": "the account or partition is not yours: check account=, partition= and qos=",
    "Invalid account": "check account= and partition=: 'sacctmgr show associations' lists yours",
    "Invalid qos": "check qos=: 'sacctmgr show qos' lists them",
    "invalid partition": "check partition=: 'sinfo' lists them",
    "Requested node configuration is not available": (
        "no node has so much: check gpus_per_node=, cpus_per_node= (--slots), memory=, partition="
    ),
    "time limit": "check time_limit= against the partition's: 'sinfo -o %P,%l' lists them",
    "slurm_load_jobs error": "is slurmctld up? 'scontrol ping' tells",
    "configuration source": "this machine does not know its cluster: set SLURM_CONF, or have its slurm.conf put here",
    "Unable to contact": "is slurmctld up? 'scontrol ping' tells",
}
# The line with the reason, where it is not the first: the name of a limit, or munge's failure.
_WHY = re.compile(r"\b(?:Assoc|QOS)[A-Z]\w+|\bMax\w+Per\w+|\bMunge \w+ failed")
_CONFIGURATIONS = ("/etc/slurm/slurm.conf", "/etc/slurm-llnl/slurm.conf", "/run/slurm/conf/slurm.conf")
_MUNGE_SOCKET = "/run/munge/munge.socket.2"


class SlurmCommands:
    """The commands that Pollux uses. `seconds`: how long one may take before it is killed."""

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
        """All jobs of that name, with those that ended lately; one row for each element of an array."""
        words = ["squeue", "-h", "-r", "-t", "all", f"--user={os.getuid()}", f"--name={name}", "-o", SQUEUE_FORMAT]
        return self.run(words)

    def nodes(self, names: Sequence[str]) -> str:
        """The state of these nodes."""
        return self.run(["sinfo", "-h", "-N", f"--nodes={fold_nodes(names)}", "-o", SINFO_FORMAT])

    def all_nodes(self, partition: str) -> str:
        """State and used resources of every node of a partition; of the whole cluster where no partition is named."""
        where = [f"--partition={partition}"] if partition else []
        return self.run(["sinfo", "-h", "-N", *where, "-O", ALL_NODES_FORMAT])

    def limits(self) -> tuple[str, str]:
        """Slurm's configuration, and its partitions, a line each."""
        return self.run(["scontrol", "show", "config"]), self.run(["scontrol", "--oneliner", "show", "partition"])

    def submit(self, script: str, count: int, exclude: Sequence[str] = ()) -> str:
        """Submit an array of `count` jobs that avoid the nodes in `exclude`; the id of the array."""
        said = self.run(array_words(count, fold_nodes(exclude)), script).strip()
        found = re.fullmatch(r"(\d+)(?:;\S+)?", said.splitlines()[-1] if said else "")
        if found is None:
            raise BackendFailed(f"sbatch printed '{said[:200]}' instead of a job's number; see whether it was taken")
        return found.group(1)

    def cancel(self, ids: Sequence[str]) -> None:
        """Cancel these jobs; jobs that have ended are ignored."""
        for first in range(0, len(ids), _MOST_WORDS):
            self.run(["scancel", "--quiet", *ids[first : first + _MOST_WORDS]])

    def keep_only(self, pilot: str, nodes: Sequence[str]) -> None:
        """Have a running batch job give back all its nodes but these, the first of which runs its script."""
        self.run(["scontrol", "update", f"JobId={pilot}", f"NodeList={fold_nodes(nodes)}"])

    def run(self, words: Sequence[str], given: str = "") -> str:
        """The output of a command; BackendFailed where it fails, does not exist, or takes too long."""
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
            why = _no_munge(self._environ) or "is slurmctld up and reachable?"
            raise BackendFailed(
                f"'{words[0]}' did not answer within {self._seconds:g} s and was ended; {why}"
            ) from None
        if process.returncode != 0:
            raise BackendFailed(_explain(words[0], process.returncode, complaint or said))
        return said


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a command and all processes that it started, without waiting for one that keeps its output open."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=1.0)
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    # It has been killed, and waits for the kernel at most: what it started may hold the output open for longer.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=5.0)


def _no_munge(environ: Mapping[str, str]) -> str:
    """A sentence if munged has died: commands try its socket for most of a minute before they report that.

    Empty where munged answers, or where it is not known that the cluster uses munge.
    """
    text = ""
    for path in [environ["SLURM_CONF"]] if environ.get("SLURM_CONF") else _CONFIGURATIONS:
        with contextlib.suppress(OSError):
            text = text or Path(path).read_text(errors="replace")
    kind = re.search(r"^\s*AuthType\s*=\s*(\S+)", text, re.MULTILINE | re.IGNORECASE)
    if not text or (kind is not None and kind.group(1) != "auth/munge"):
        return ""
    named = re.search(r"^\s*AuthInfo\s*=.*?\bsocket=([^,\s]+)", text, re.MULTILINE | re.IGNORECASE)
    path = named.group(1) if named else _MUNGE_SOCKET
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            probe.connect(path)
    except ConnectionRefusedError:
        return f"nobody answers at munge's socket {path}; {_AUTHENTICATION}"
    except OSError:
        # The commands may use another path, and they fail at once where no socket is there.
        return ""
    return ""


def _explain(command: str, code: int, complaint: str) -> str:
    lines = [line.strip() for line in complaint.splitlines() if line.strip()]
    # The last line says that the request was refused, and often only an earlier one says why.
    why = next((line for line in lines if _WHY.search(line)), lines[0] if lines else "it said nothing")
    said = "; ".join(dict.fromkeys([why, *lines[-1:]]))
    remedy = next((text for key, text in _REMEDIES.items() if key.lower() in complaint.lower()), "")
    return f"'{command}' failed with exit code {code}: {said}{'; ' + remedy if remedy else ''}"
