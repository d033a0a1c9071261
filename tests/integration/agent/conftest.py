"""Starting the replicas of a framework's training as torchrun would, on the loopback interface."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pollux.testing.ports import free_port
from pollux.testing.waiting import PATIENCE_SECONDS, OutOfTime

_ENDS = {"": 0, "killed": -signal.SIGKILL, "stopped": 128 + signal.SIGTERM}
_LATE = -1000 - signal.SIGKILL  # as `forked.py` gives it
_ENVIRONMENT = {
    # For `tests.support`: a script has only its own folder in its path.
    "PYTHONPATH": str(Path(__file__).parents[3]),
    "MASTER_ADDR": "127.0.0.1",
    "TORCHELASTIC_RUN_ID": "test",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True)
class Run:
    """One start of the job: on how many replicas, with what settings, and how all of them must end."""

    num_replicas: int
    settings: dict[str, Any]
    end: str = ""


Launch = Callable[[str, Sequence[tuple[Any, ...]]], list[list[Any]]]


class Server:
    """A job's script as a process that has imported its framework, which takes seconds, and forks replicas."""

    def __init__(self, script: str) -> None:
        self.script = script
        # A session of its own, so that nothing of it can outlive these tests.
        self.process = subprocess.Popen(
            [sys.executable, script],
            env={**os.environ, **_ENVIRONMENT},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, run: Run, folder: Path, workdir: Path) -> None:
        """One run, to the end of all its replicas."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        asked = {
            "num_replicas": run.num_replicas,
            "settings": run.settings,
            "folder": str(folder),
            "workdir": str(workdir),
            "port": free_port(),
            "timeout": PATIENCE_SECONDS,
        }
        print(json.dumps(asked), file=self.process.stdin, flush=True)
        if not select.select([self.process.stdout], [], [], 2 * PATIENCE_SECONDS)[0]:
            raise OutOfTime(f"{self.script}: no end of a run after {2 * PATIENCE_SECONDS:g} s")
        assert self.process.stdout.readline() == "done\n", (
            f"{self.script} ended with {self.process.wait(PATIENCE_SECONDS)}"
        )

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, Server]]:
    """By script, for all tests of a file."""
    started: dict[str, Server] = {}
    yield started
    for server in started.values():
        server.close()


@pytest.fixture
def launch(tmp_path: Path, servers: dict[str, Server]) -> Launch:
    """`launch(script, [(num_replicas, settings), (num_replicas, settings, "killed"), ...])`, one run after another.

    Returns what the replicas of each run answered. A run that is "killed" must end by SIGKILL on every replica, a
    "stopped" one with exit code 143.
    """

    def start(script: str, runs: Sequence[tuple[Any, ...]]) -> list[list[Any]]:
        asked = [Run(*run) for run in runs]
        folders = [tmp_path / f"run-{number}" for number in range(len(asked))]
        server = servers.pop(script, None) or Server(script)
        try:
            for run, folder in zip(asked, folders, strict=True):
                folder.mkdir()
                server.run(run, folder, folders[0])
        except BaseException:
            server.close()
            raise
        servers[script] = server
        return [_answers(run, folder) for run, folder in zip(asked, folders, strict=True)]

    return start


def _answers(run: Run, folder: Path) -> list[Any]:
    codes = json.loads((folder / "codes.json").read_text())
    said = "\n".join(path.read_text()[-3000:] for path in sorted(folder.glob("output-*.txt")))
    if _LATE in codes and not {*codes} - {*_ENDS.values(), _LATE}:
        raise OutOfTime(f"replicas were not through after {PATIENCE_SECONDS:g} s: {codes}\n{said}")
    assert codes == [_ENDS[run.end]] * run.num_replicas, said
    if run.end:
        return []
    return [json.loads((folder / f"answer-{replica}.json").read_text()) for replica in range(run.num_replicas)]
