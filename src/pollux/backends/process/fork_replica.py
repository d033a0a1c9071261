"""Starts one replica: forks a process with its own session, log, cores and environment that runs the job's command."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pollux.backends.process import proc, warm_python

__all__ = ["ForkedReplica", "ReplicaStart", "start_replica"]

_OOM_SCORE = "500"
_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)


@dataclass(frozen=True, slots=True)
class ReplicaStart:
    """Everything that one replica is started with; `environ`: its whole environment; `cores`: empty for any core."""

    argv: tuple[str, ...]
    workdir: str
    environ: Mapping[str, str]
    cores: tuple[int, ...]
    path_was_set: bool


class ForkedReplica(BaseException):
    """Raised in the forked process to leave the shim's loop; the caller then drops the shim, and calls `become`."""

    def __init__(self, become: Callable[[], int]) -> None:
        super().__init__()
        self.become = become


def start_replica(
    start: ReplicaStart, output: int, warm_variables: Mapping[str, str] | None, close_in_fork: Callable[[], None]
) -> int:
    """Fork the replica's process and return its pid; it writes to the file `output`.

    The forked process first calls `close_in_fork`, which closes its copies of the parent's sockets. It then executes
    another program; or, where `warm_variables` are given and the command is a Python script, it raises `ForkedReplica`.
    """
    shim = os.getpid()
    # A signal that comes before the forked process has its own handlers would run the shim's handlers there.
    signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
    try:
        pid = os.fork()
    except OSError:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
        raise
    if pid:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
        return pid
    code = 126
    call = None
    try:
        _reset_signals()
        proc.die_with_parent(shim)
        close_in_fork()
        _set_up_process(start, output)
        executable = warm_python.resolved(start.argv[0], start.environ, start.path_was_set)
        if executable is not None and warm_variables is not None:
            call = warm_python.python_call(start.argv, executable, start.workdir, start.environ, warm_variables)
        if call is None:
            code = _execute(start, executable)
    except BaseException as error:
        _say(f"cannot start {start.argv[0]!r}: {error}")
        call = None
    if call is None:
        os._exit(code)
    raise ForkedReplica(_become(start, call))


def _become(start: ReplicaStart, call: warm_python.PythonCall) -> Callable[[], int]:
    asked = start.environ.get("OMP_NUM_THREADS", "")
    threads = int(asked) if asked.isdigit() else 0

    def become() -> int:
        # The command line in `ps` stays that of the process it was forked from.
        proc.name_this(f"pollux:{start.environ.get('POLLUX_JOB') or 'job'}")
        warm_python.make_like_fresh(start.environ, start.argv, threads or len(os.sched_getaffinity(0)))
        return warm_python.leave(warm_python.run_python(call))

    return become


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in _HANDLED:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)


def _set_up_process(start: ReplicaStart, output: int) -> None:
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    _close_from(3)
    if start.cores:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, start.cores)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(_OOM_SCORE)
    try:
        os.chdir(start.workdir)
    except OSError as error:
        raise OSError(f"cannot enter workdir '{start.workdir}': {error.strerror}") from None


def _close_from(first: int) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) >= first:
            with contextlib.suppress(OSError):
                os.close(int(name))


def _execute(start: ReplicaStart, executable: str | None) -> int:
    """Execute the program; returns an exit code, as shells give it, only where that fails."""
    if executable is None:
        _say(f"command '{start.argv[0]}' was not found on PATH: install it, or give its full path")
        return 127
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        # Our interpreter finds its packages by its own path, and may not be on PATH.
        first = executable if executable == sys.executable else start.argv[0]
        os.execve(executable, [first, *start.argv[1:]], dict(start.environ))
    except FileNotFoundError:
        _say(f"command '{start.argv[0]}' was not found: give a program that is there")
        return 127
    except OSError as error:
        _say(f"command '{start.argv[0]}' cannot be run: {error.strerror}")
    return 126


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"pollux: {text}\n".encode())
