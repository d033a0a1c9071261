"""Runs `python SCRIPT` jobs inside this very process, one after another, for debugging with pdb.

A job has one replica. Jobs are not isolated: the script shares memory, working folder and environment with this
process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import runpy
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO, cast

from pollux.backends.dispatch.job_table import HeldGeneration
from pollux.backends.process.log_file import whole_characters
from pollux.backends.process.outcome import judge
from pollux.backends.process.records import check_job_id
from pollux.backends.process.warm_python import exit_code_of, resolved
from pollux.backends.protocol import (
    BackendCapabilities,
    BackendEvent,
    Exit,
    Launch,
    Listener,
    LogChunk,
    Outcome,
    ReplicasEnded,
    ReplicasStarted,
    Running,
)
from pollux.core import Node
from pollux.core.errors import BackendFailed, InvalidInput
from pollux.wire.live import exit_codes

__all__ = ["InlineBackend"]


class _StopScript(SystemExit):
    """Raised inside a script that is told to stop; the exit code is that of SIGTERM."""

    def __init__(self) -> None:
        super().__init__(exit_codes.STOPPED)


class _CopiedStream:
    """Writes text to a stream and to `keep`; all else, also writes to its buffer, concerns the stream alone."""

    def __init__(self, stream: TextIO, keep: Callable[[str], None]) -> None:
        self._stream = stream
        self._keep = keep

    def write(self, text: str) -> int:
        """Write to both."""
        self._keep(text)
        return self._stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write all of these to both."""
        for line in lines:
            self.write(line)

    def close(self) -> None:
        """Leave the stream open: it is the service's."""
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class InlineBackend(BackendCapabilities):
    """One node of `slots` slots; jobs run one at a time, since they use the command line and folder of the process.

    Output goes to this process's streams, and is kept for `logs`.
    """

    name = "inline"
    restart_seconds = 5.0
    live_seconds = 5.0

    def __init__(self, slots: int = 1) -> None:
        if isinstance(slots, bool) or slots < 1:
            raise InvalidInput(f"slots is {slots}: give a whole number, 1 or more")
        self._node = Node("inline", slots, "cpu", num_cpus=float(os.cpu_count() or 1))
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._jobs: dict[str, HeldGeneration] = {}
        self._waiting: list[tuple[str, HeldGeneration]] = []
        self._logs: dict[str, bytearray] = {}
        self._script: tuple[str, int] | None = None
        self._listener: Listener | None = None
        self._thread: threading.Thread | None = None
        self._closing = False

    @property
    def healthy(self) -> bool:
        """Whether the backend's thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, listener: Listener) -> None:
        """Start the thread; there are no earlier jobs to find."""
        self._listener = listener
        self._thread = threading.Thread(target=self._run, name="pollux-inline-backend", daemon=True)
        self._thread.start()

    def inventory(self) -> tuple[Node, ...]:
        """One node of CPU slots, whatever GPUs the script may use."""
        return (self._node,)

    def submit(self, launch: Launch) -> None:
        """Run the job after those that were submitted before."""
        self._check(launch)
        with self._changed:
            held = self._jobs.get(launch.job_id)
            if held is not None and launch.generation <= held.generation:
                return
            self._jobs[launch.job_id] = HeldGeneration(launch.generation, launch)
            self._waiting.append((launch.job_id, self._jobs[launch.job_id]))
            self._changed.notify_all()

    def resize(self, launch: Launch) -> None:
        """Stop the job's earlier generation, and submit this one."""
        self._check(launch)
        with self._lock:
            held = self._jobs.get(launch.job_id)
            if held is not None and launch.generation <= held.generation:
                return
        if held is not None:
            self.stop(launch.job_id, held.generation, launch.grace_seconds)
        self.submit(launch)

    def stop(self, job_id: str, generation: int, grace_seconds: float) -> None:
        """Raise SystemExit in the script at its next line of Python; a thread cannot be killed."""
        with self._changed:
            for job, held in self._waiting:
                if job == job_id and held.generation <= generation:
                    held.ask_to_stop(grace_seconds)
            if self._script is not None and self._script[0] == job_id and self._script[1] <= generation:
                thread = self._thread.ident if self._thread is not None else None
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread or 0), ctypes.py_object(_StopScript))
                held = self._jobs[job_id]
                if held.generation == self._script[1]:
                    held.ask_to_stop(grace_seconds)
            self._changed.notify_all()

    def running(self) -> tuple[Running, ...]:
        """Every job that was not forgotten."""
        with self._lock:
            return tuple(Running(job, held.generation, held.state, held.ended) for job, held in self._jobs.items())

    def logs(self, job_id: str, replica: int = 0, offset: int = 0, limit: int = 65536) -> LogChunk:
        """A piece of the script's output; empty for any replica but 0."""
        with self._lock:
            whole = bytes(self._logs.get(check_job_id(job_id), b"")) if replica == 0 else b""
        first = min(len(whole), offset if offset >= 0 else max(0, len(whole) + offset))
        piece = whole[first : first + max(4, limit)]
        if first + len(piece) < len(whole):
            piece = whole_characters(piece) or piece
        return LogChunk(piece.decode(errors="replace"), first + len(piece), first + len(piece) >= len(whole))

    def forget(self, job_id: str) -> None:
        """Forget an ended job, but keep its output."""
        with self._lock:
            held = self._jobs.get(job_id)
            if held is not None and held.ended is not None:
                del self._jobs[job_id]

    def close(self) -> None:
        """End the thread; a running script goes on until it or this process ends."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            busy = self._script is not None
        if self._thread is not None and not busy:
            self._thread.join()

    def _check(self, launch: Launch) -> None:
        check_job_id(launch.job_id)
        if launch.placement.num_gpus != 1 or launch.placement.on(self._node.id) != 1:
            raise BackendFailed(
                f"job '{launch.job_id}' cannot be placed at '{launch.placement}': the inline backend runs one replica "
                "a job, on 'inline'; ask for 1 GPU, or use the local backend"
            )
        argv = launch.argv
        executable = resolved(argv[0], os.environ, False) if argv else None
        if len(argv) < 2 or executable != sys.executable or argv[1].startswith("-"):
            raise BackendFailed(
                f"job '{launch.job_id}' runs {' '.join(argv)!r}: the inline backend takes `python SCRIPT` only; use "
                "the local backend"
            )

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closing:
                    self._changed.wait()
                if self._closing:
                    return
                job_id, held = self._waiting.pop(0)
            launch = held.launch
            assert launch is not None
            if held.stop_grace is not None:
                self._end(job_id, held, (), "stopped", "stopped before it was started")
                continue
            self._tell(ReplicasStarted(time.time(), job_id, held.generation))
            with self._lock:
                held.started = True
                self._script = (job_id, held.generation)
            code = self._call(launch)
            exits = (Exit(0, code, time.time()),)
            with self._lock:
                tail = bytes(self._logs.get(job_id, b"")[-8192:])
            told = held.stop_grace is not None
            outcome, detail = judge(exits, {0: tail}, told, frozenset(), asked=frozenset({0} if told else ()))
            self._end(job_id, held, exits, outcome, detail)

    def _call(self, launch: Launch) -> int:
        def keep(text: str) -> None:
            with self._lock:
                self._logs.setdefault(launch.job_id, bytearray()).extend(text.encode(errors="replace"))

        try:
            with _as_process(launch, keep):
                try:
                    runpy.run_path(launch.argv[1], run_name="__main__")
                    return 0
                except SystemExit as stop:
                    return exit_code_of(stop)
                except BaseException:
                    traceback.print_exc()
                    return 1
                finally:
                    with self._lock:
                        self._script = None
        except _StopScript:
            # The script had ended already, and this thread must go on.
            return 0
        except OSError as error:
            keep(f"pollux: cannot start: {error}\n")
            return 126

    def _end(self, job_id: str, held: HeldGeneration, exits: tuple[Exit, ...], outcome: Outcome, detail: str) -> None:
        with self._lock:
            self._script = None
            held.ended = ReplicasEnded(time.time(), job_id, held.generation, outcome, exits, detail)
        self._tell(held.ended)

    def _tell(self, event: BackendEvent) -> None:
        if self._listener is not None:
            self._listener(event)


def _variables(launch: Launch, port: str) -> dict[str, str]:
    alone = dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "NODE_RANK"), "0")
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"), "1")
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "POLLUX_NUM_NODES": "1"}
    return {**launch.env, **alone, **sizes, **meeting, "ROLE_NAME": "default"}


@contextlib.contextmanager
def _as_process(launch: Launch, keep: Callable[[str], None]) -> Iterator[None]:
    """Give this process the command line, folder, variables and streams of the job, and restore its own afterwards."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    before = dict(os.environ), os.getcwd(), sys.argv, [*sys.path], sys.stdout, sys.stderr
    try:
        os.chdir(launch.workdir)
        os.environ.update(_variables(launch, port))
        sys.argv = [*launch.argv[1:]]
        sys.path.insert(0, os.path.dirname(os.path.abspath(launch.argv[1])))
        sys.stdout = cast(TextIO, _CopiedStream(before[4], keep))
        sys.stderr = cast(TextIO, _CopiedStream(before[5], keep))
        yield
    finally:
        variables, folder, sys.argv, sys.path[:], sys.stdout, sys.stderr = before
        os.environ.clear()
        os.environ.update(variables)
        os.chdir(folder)
