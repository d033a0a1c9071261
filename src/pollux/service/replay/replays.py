"""The cluster's own history replayed under other policies and sizes: `pollux whatif` in a process of its own.

One at a time, bounded in time and memory, ended with the service. Its result is kept until newer ones replace it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pollux.core.errors import Conflict, InvalidInput, UnknownName

__all__ = ["MOST_CHOICES", "Progress", "Replay", "Replays", "command_of"]

MOST_CHOICES = 6
"""The most policies, and the most sizes, of one replay."""

State = Literal["running", "done", "failed", "cancelled"]

_KEPT = 8
_LONGEST_SECONDS = 1800
_MOST_BYTES = 8 * 2**30
_LARGEST_OUTPUT = 256 * 2**20
_LARGEST_RESULT = 32 * 2**20
_SHORTEN_SECONDS = 120
_POLL_SECONDS = 0.25
# A child ends with its parent, has a low priority, and limits of time and memory.
_BOUNDED = """
import ctypes, os, resource, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.nice(10)
resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[2]), int(sys.argv[2])))
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[3]), int(sys.argv[3])))
"""
_CHILD = f"""{_BOUNDED}
sys.argv = ["pollux", *sys.argv[4:]]
from pollux.cli.main import main
main()
"""
# Reading the result of a large replay would hold the service up: another process does it.
_SHORTEN = f"""{_BOUNDED}
from pollux.service.replay.result import shorten
shorten(*sys.argv[4:])
"""
# The character that follows shows that the number is complete: the bar may be read while it is written.
_DONE_OF = re.compile(rb"(\d+)/(\d+)(?=\D)")


def command_of(history: Path, policies: Sequence[str], nodes: Sequence[str]) -> list[str]:
    """The arguments of `pollux` for one replay."""
    words = ["whatif", "--json", "--history", str(history), "--workers", "1", "--policy", ",".join(policies)]
    return [*words, f"--nodes={','.join(nodes)}"] if nodes else words


class Progress:
    """How far a replay is, read from its progress bar, which goes from 0 to all jobs for each size in turn."""

    def __init__(self, num_sizes: int) -> None:
        self._num_sizes = max(num_sizes, 1)
        self._through = 0
        self._share = 0.0

    def take(self, output: bytes) -> None:
        """Read what the progress bar has written since."""
        for done, total in _DONE_OF.findall(output):
            share = min(int(done) / max(int(total), 1), 1.0)
            if share < self._share:
                self._through = min(self._through + 1, self._num_sizes - 1)
            self._share = share

    @property
    def share(self) -> float:
        """From 0 to 1."""
        return min((self._through + self._share) / self._num_sizes, 1.0)


@dataclass(slots=True)
class Replay:
    """One replay. `detail` says why it failed; `result` is its result as JSON, once it is done."""

    id: str
    state: State = "running"
    progress: float = 0.0
    detail: str = ""
    policies: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    result: bytes | None = None

    def summary(self) -> dict[str, Any]:
        """As plain values, without the result."""
        return {
            "id": self.id, "state": self.state, "progress": round(self.progress, 4), "detail": self.detail,
            "policies": list(self.policies), "nodes": list(self.nodes),
        }  # fmt: skip

    def to_json(self) -> bytes:
        """As JSON, with the result."""
        head = json.dumps(self.summary(), separators=(",", ":"))
        return head[:-1].encode() + b',"result":' + (self.result or b"null") + b"}"


class Replays:
    """Starts replays, and keeps the last few. May be used from any thread."""

    def __init__(self, history: Callable[[], Iterable[bytes]], child: Sequence[str] = (sys.executable, "-c", _CHILD)):
        self._history = history
        self._child = tuple(child)
        self._lock = threading.Lock()
        self._kept: dict[str, Replay] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._cancelled = threading.Event()
        self._closed = False

    def start(self, policies: Sequence[str], nodes: Sequence[str]) -> Replay:
        """Start a replay; Conflict while another runs."""
        with self._lock:
            if self._closed:
                raise Conflict("the service is stopping: nothing is replayed any more")
            if self._thread is not None and self._thread.is_alive():
                raise Conflict("a replay is under way; wait until it is done, or cancel it")
            replay = Replay(secrets.token_hex(8), policies=tuple(policies), nodes=tuple(nodes))
            self._kept[replay.id] = replay
            while len(self._kept) > _KEPT:
                self._kept.pop(next(iter(self._kept)))
            self._cancelled.clear()
            args = (replay, tuple(policies), tuple(nodes))
            self._thread = threading.Thread(target=self._run, args=args, name="pollux-whatif", daemon=True)
            self._thread.start()
        return replay

    def all(self) -> list[Replay]:
        """The kept replays, the newest first."""
        with self._lock:
            return list(reversed(self._kept.values()))

    def get(self, replay_id: str) -> Replay:
        """A kept replay; UnknownName if there is none."""
        found = self._kept.get(replay_id)
        if found is None:
            raise UnknownName("replay", replay_id[:80], list(self._kept))
        return found

    def cancel(self, replay_id: str) -> Replay:
        """End a running replay; one that has ended stays as it is."""
        replay = self.get(replay_id)
        if replay.state == "running":
            self._cancelled.set()
            self._kill()
            thread = self._thread
            if thread is not None:
                thread.join(60)
        return replay

    def close(self) -> None:
        """End a replay that runs, and start no more."""
        with self._lock:
            self._closed = True
        self._cancelled.set()
        self._kill()
        if self._thread is not None:
            self._thread.join(60)

    def _kill(self) -> None:
        process = self._process
        if process is not None:
            with contextlib.suppress(OSError):
                process.kill()

    def _run(self, replay: Replay, policies: Sequence[str], nodes: Sequence[str]) -> None:
        try:
            with tempfile.TemporaryDirectory(prefix="pollux-whatif-") as folder:
                replay.result = self._replayed(replay, Path(folder), policies, nodes)
            replay.progress, replay.state = 1.0, "done"
        except InvalidInput as error:
            replay.detail, replay.state = str(error), "failed"
        except Exception as error:
            replay.detail, replay.state = f"the replay failed: {error!r}", "failed"
        if self._cancelled.is_set() and replay.state != "done":
            replay.detail, replay.state = "", "cancelled"

    def _replayed(self, replay: Replay, folder: Path, policies: Sequence[str], nodes: Sequence[str]) -> bytes:
        history = folder / "history.jsonl"
        with history.open("wb") as file:
            for line in self._history():
                file.write(line)
                if self._cancelled.is_set():
                    raise InvalidInput("cancelled")
        words = command_of(history, policies, nodes)
        with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
            code = self._watched(replay, words, out, err, 1 + len(nodes))
        said = (folder / "err").read_bytes()[-4000:].decode("utf-8", "replace")
        if code != 0:
            raise InvalidInput(_why(code, said))
        if (folder / "out").stat().st_size > _LARGEST_OUTPUT:
            raise InvalidInput("what it came to is too large to show; replay it with 'pollux whatif --output DIR'")
        return self._shortened(folder / "out", folder / "short")

    def _shortened(self, out: Path, short: Path) -> bytes:
        limits = (str(os.getpid()), str(_SHORTEN_SECONDS), str(_MOST_BYTES))
        done = subprocess.run(
            [sys.executable, "-c", _SHORTEN, *limits, str(out), str(short)], stdin=subprocess.DEVNULL,
            capture_output=True, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            said = _last_words(done.stderr[-4000:].decode("utf-8", "replace"))
            raise InvalidInput(f"what it came to could not be read: {said or f'code {done.returncode}'}")
        if short.stat().st_size > _LARGEST_RESULT:
            raise InvalidInput("what it came to is too large to show; replay it with 'pollux whatif --output DIR'")
        return short.read_bytes()

    def _watched(self, replay: Replay, words: Sequence[str], out: Any, err: Any, num_sizes: int) -> int:
        limits = (str(os.getpid()), str(_LONGEST_SECONDS), str(_MOST_BYTES))
        # The progress bar is written although nobody sees it: it says how far the replay is.
        environ = {
            name: value for name, value in os.environ.items() if not name.startswith(("POLLUX_", "NO_COLOR", "TTY_"))
        }
        environ |= {"FORCE_COLOR": "1", "COLUMNS": "100", "TERM": "xterm", "PYTHONUTF8": "1"}
        environ |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        progress = Progress(num_sizes)
        with subprocess.Popen(
            [*self._child, *limits, *words], stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environ
        ) as process:
            self._process = process
            try:
                if self._cancelled.is_set():
                    process.kill()
                with open(err.name, "rb") as bar:
                    while True:
                        with contextlib.suppress(subprocess.TimeoutExpired):
                            return process.wait(_POLL_SECONDS)
                        progress.take(bar.read())
                        replay.progress = progress.share
            finally:
                self._process = None
                process.kill()


def _why(code: int, said: str) -> str:
    """Why a replay failed: its last line, or the limit that ended it."""
    if code in (-signal.SIGKILL, -signal.SIGXCPU):
        return (
            f"it was ended: more than {_LONGEST_SECONDS // 60} min of a processor, or too little memory; choose fewer "
            "policies or sizes, or replay it with 'pollux whatif'"
        )
    if "MemoryError" in said:
        return f"it needs more than {_MOST_BYTES // 2**30} GiB of memory; choose fewer policies or sizes"
    return _last_words(said) or f"it ended with code {code}"


def _last_words(said: str) -> str:
    """The last line for people, without the bar and its colours."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said).replace("\r", "\n")
    lines = [line.strip() for line in plain.splitlines() if line.strip() and "━" not in line]
    return lines[-1].removeprefix("error: ")[:500] if lines else ""
