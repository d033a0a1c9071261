#!/usr/bin/env python3
"""A real Slurm cluster of several nodes on this machine, in a scratch folder, for tests and for trying things out.

    python tools/slurm/cluster.py install                # Debian's packages; needs root and apt
    python tools/slurm/cluster.py start --dir /tmp/lab   # prints the SLURM_CONF to export
    python tools/slurm/cluster.py stop --dir /tmp/lab

Every node is a slurmd in a process namespace of its own, with GPU devices that are none: to kill a node is to end that
namespace, and everything in it ends with it. Nothing listens beyond 127.0.0.1; processes are ended by their ids.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pwd
import random
import secrets
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "sinfo", "scancel", "scontrol")
PACKAGES = ("slurm-wlm", "munge")
READY_SECONDS = 300.0  # on a busy machine; a wait ends with what it waits for
_SEARCH_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin", "/usr/local/sbin"])

_CONF = """\
ClusterName=lab
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/run/munge.sock
CredType=cred/munge
SlurmctldPort={port}
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdPidFile={folder}/run/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool/%n
SlurmdLogFile={folder}/log/slurmd.%n.log
StateSaveLocation={folder}/state
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdTimeout=300
KillWait=30
OverTimeLimit=0
MinJobAge=60
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
{nodes}
PartitionName=main Nodes=node[1-{count}] Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace} MaxTime=1-0
PartitionName=high Nodes=node[1-{count}] PriorityTier=10 PreemptMode=OFF MaxTime=1-0
"""


def missing() -> str:
    """What keeps a cluster from being started here, and the remedy; empty where nothing does."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=_SEARCH_PATH) is None]
    if absent:
        return f"Slurm is not installed (no {', '.join(absent)}): run 'python tools/slurm/cluster.py install' as root"
    if os.geteuid() != 0:
        return "a test cluster makes device files and namespaces: run as root"
    if shutil.which("unshare") is None:
        return "no 'unshare' (util-linux): install it"
    return ""


def install() -> str:
    """Install Debian's packages where they are missing; what went wrong and the remedy, in one line, or empty."""
    if all(shutil.which(name, path=_SEARCH_PATH) for name in PROGRAMS):
        return ""
    words = [str(Path(__file__).parents[1] / "debian.sh"), "install", "Slurm", *PACKAGES]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.stderr.strip() if done.returncode else ""


class SlurmCluster:
    """Daemons in `folder`: one controller, `nodes` nodes with `gpus` devices each. `start`, then `stop`, once each.

    `types`: of which type the devices of each node are, one word for each node; empty: of none that is named.
    `grace_seconds` lie between a preemption's notice and its end. `with_parent`: daemons end with this process.
    """

    def __init__(
        self,
        folder: Path,
        nodes: int = 3,
        gpus: int = 4,
        grace_seconds: int = 0,
        with_parent: bool = False,
        types: Sequence[str] = (),
    ) -> None:
        self.folder = folder.absolute()
        self.conf = self.folder / "slurm.conf"
        self.nodes = [f"node{number}" for number in range(1, nodes + 1)]
        self._gpus = gpus
        self._types = dict(zip(self.nodes, types or [""] * nodes, strict=True))
        self._grace_seconds = grace_seconds
        self._with_parent = with_parent
        self._pids: dict[str, int] = {}
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def environ(self) -> dict[str, str]:
        """What a process needs beside its own environment to talk to this cluster."""
        return {"SLURM_CONF": str(self.conf), "PATH": _SEARCH_PATH}

    def start(self) -> None:
        """Write the configuration and start all daemons; returns when every node is idle."""
        self._write()
        self._make_key()
        self.start_munge()
        self.start_controller()
        for node in self.nodes:
            self.start_node(node)
        self.wait_for(lambda: set(self.states().values()) == {"idle"}, "idle nodes")

    def stop(self) -> None:
        """End every daemon and all that runs on the nodes."""
        for name in [*self.nodes, "slurmctld", "munged"]:
            self._end(name)
        (self.folder / "pids.json").unlink(missing_ok=True)

    def run(self, *words: str, timeout: float = 60.0) -> str:
        """The output of a Slurm command; CalledProcessError where it fails."""
        environ = {**os.environ, **self.environ}
        done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=timeout, check=True)
        return done.stdout

    def states(self) -> dict[str, str]:
        """State by node, as `sinfo` has it."""
        lines = self.run("sinfo", "-h", "-N", "-p", "main", "-o", "%N %T").splitlines()
        return dict(line.split(maxsplit=1) for line in lines)

    def wait_for(self, is_so: object, what: str, seconds: float = READY_SECONDS) -> None:
        """Return once `is_so()` holds; TimeoutError after `seconds`."""
        assert callable(is_so)
        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(subprocess.SubprocessError):
                if is_so():
                    return
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {what} after {seconds:g} s; see {self.folder}/log")
            time.sleep(0.05)

    # Daemons

    def start_controller(self) -> None:
        """Start slurmctld, with what it had saved where it ran before."""
        fresh = [] if (self.folder / "state" / "job_state").exists() else ["-c"]
        self._spawn("slurmctld", ["slurmctld", "-D", "-f", str(self.conf), *fresh])

    def stop_controller(self) -> None:
        """End slurmctld; it saves what it knows, and a new one goes on from there."""
        self._end("slurmctld", signal.SIGTERM)

    def start_munge(self) -> None:
        """Start munged, by which commands and daemons know each other."""
        munge, run = self.folder / "munge", self.folder / "run"
        words = ["munged", "--foreground", "--force", f"--key-file={munge}/key", f"--socket={run}/munge.sock"]
        words += [f"--pid-file={run}/munged.pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed"]
        (run / "munge.sock").unlink(missing_ok=True)
        # Said again: who becomes another user is no longer told of its parent's end.
        ends = ["--pdeathsig", "KILL"] if self._with_parent else []
        self._spawn("munged", ["setpriv", "--reuid=munge", "--regid=munge", "--clear-groups", *ends, *words])
        self.wait_for((run / "munge.sock").exists, "socket of munged")

    def stop_munge(self, crash: bool = False) -> None:
        """End munged; as a `crash` would, it leaves its socket behind, at which nobody answers."""
        self._end("munged", signal.SIGKILL if crash else signal.SIGTERM)

    def start_node(self, node: str, hide: Sequence[Path] = ()) -> None:
        """Start a node, which has nothing of what ran there before; instead of the folders `hide` it has empty ones."""
        mounts = "".join(f"mount -t tmpfs none {shlex.quote(str(folder))} && " for folder in hide)
        command = f'{mounts}slurmd -D -f "{self.conf}" -N {node} & wait'
        # The shell is the namespace's first process: it reaps what others leave behind.
        words = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c", command]
        self._spawn(node, words)

    def kill_node(self, node: str) -> None:
        """End a node with all of its processes at once, as a power failure would."""
        self._end(node, signal.SIGKILL)

    def freeze_node(self, node: str) -> None:
        """Stop every process of a node, as a hang would."""
        self._signal_all(node, signal.SIGSTOP)

    def thaw_node(self, node: str) -> None:
        """Let a frozen node go on."""
        self._signal_all(node, signal.SIGCONT)

    def processes(self, node: str) -> list[int]:
        """The ids of a node's processes, as this machine counts them."""
        outer = self._pids.get(node)
        if outer is None:
            return []
        children = Path(f"/proc/{outer}/task/{outer}/children").read_text().split()
        if not children:
            return []
        space = os.readlink(f"/proc/{children[0]}/ns/pid")
        found = []
        for entry in os.scandir("/proc"):
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/{entry.name}/ns/pid") == space:
                        found.append(int(entry.name))
        return found

    def _signal_all(self, node: str, number: int) -> None:
        for pid in self.processes(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _spawn(self, name: str, words: list[str]) -> None:
        environ = {**os.environ, **self.environ}
        if self._with_parent:
            words = ["setpriv", "--pdeathsig", "KILL", "--", *words]
        with (self.folder / "log" / f"{name}.out").open("ab") as output:
            process = subprocess.Popen(
                words, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        self._children[name] = process
        self._pids[name] = process.pid
        (self.folder / "pids.json").write_text(json.dumps(self._pids))

    def _end(self, name: str, number: int = signal.SIGKILL) -> None:
        pid = self._pids.pop(name, None)
        if pid is None:
            return
        # Ours, and not another that got the number since: its environment names this cluster's configuration.
        with contextlib.suppress(OSError):
            if str(self.conf).encode() in Path(f"/proc/{pid}/environ").read_bytes():
                os.kill(pid, number)
        child = self._children.pop(name, None)
        if child is not None:
            child.wait(READY_SECONDS)

    # Files

    def _write(self) -> None:
        for name in ("run", "log", "state", "munge", "dev", *(f"spool/{node}" for node in self.nodes)):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        ports = _free_ports(len(self.nodes) + 1)
        kinds = {node: f":{kind}" if kind else "" for node, kind in self._types.items()}
        lines = [
            f"NodeName={node} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs=8 RealMemory=4000 "
            f"Gres=gpu{kinds[node]}:{self._gpus}"
            for node, port in zip(self.nodes, ports[1:], strict=True)
        ]
        text = _CONF.format(
            folder=self.folder, port=ports[0], nodes="\n".join(lines), count=len(self.nodes), grace=self._grace_seconds
        )
        self.conf.write_text(text)
        for number in range(self._gpus):
            device = self.folder / "dev" / f"nvidia{number}"
            if not device.exists():
                os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        files = f"{self.folder}/dev/nvidia[0-{self._gpus - 1}]"
        named = {node: f" Type={kind}" if kind else "" for node, kind in self._types.items()}
        gres = "".join(f"NodeName={node} Name=gpu{named[node]} File={files}\n" for node in self.nodes)
        (self.folder / "gres.conf").write_text(f"AutoDetect=off\n{gres}")

    def _make_key(self) -> None:
        user = pwd.getpwnam("munge")
        key = self.folder / "munge" / "key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        for path in (key, key.parent, self.folder / "run"):
            os.chown(path, user.pw_uid, user.pw_gid)
        for folder in (self.folder, key.parent, self.folder / "run"):
            folder.chmod(0o755)


def _free_ports(count: int) -> list[int]:
    """Ports where nobody listens, below those that systems hand out by chance: the daemons take them a moment later."""
    found: set[int] = set()
    while len(found) < count:
        port = random.SystemRandom().randint(12_000, 19_999)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.add(port)
    return sorted(found)


def _in_use(folder: Path) -> str:
    """Whether a cluster runs in this folder, another clone's perhaps, and the remedy; empty where none does."""
    try:
        pids = json.loads((folder / "pids.json").read_text()).values()
    except (OSError, ValueError):
        return ""
    for pid in pids:
        with contextlib.suppress(OSError):
            if f"{folder.absolute()}/slurm.conf".encode() in Path(f"/proc/{pid}/environ").read_bytes():
                return f"a cluster runs in {folder} already: stop it, or give another folder with --dir"
    return ""


def _stop(folder: Path) -> str:
    """End a cluster that another run of this script started."""
    try:
        pids = json.loads((folder / "pids.json").read_text())
    except (OSError, ValueError):
        return f"no cluster was started in {folder}"
    cluster = SlurmCluster(folder)
    cluster._pids = {str(name): int(pid) for name, pid in pids.items()}
    cluster.nodes = [name for name in pids if name.startswith("node")]
    cluster.stop()
    return ""


def main() -> int:
    """What the command line asks for; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("action", choices=("install", "start", "stop"))
    parser.add_argument("--dir", type=Path, default=Path("/tmp/pollux-slurm"))
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--grace", type=int, default=0, help="seconds between a preemption's notice and its end")
    given = parser.parse_args()
    if given.action == "install":
        wrong = install()
    elif given.action == "stop":
        wrong = _stop(given.dir)
    else:
        wrong = missing() or _in_use(given.dir)
        if not wrong:
            cluster = SlurmCluster(given.dir, given.nodes, given.gpus, given.grace)
            cluster.start()
            print(f"export SLURM_CONF={cluster.conf}")
    if wrong:
        print(wrong, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
