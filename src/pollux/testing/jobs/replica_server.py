"""Small training jobs on several replicas: one process that has imported PyTorch forks the replicas of every run.

A forked replica starts in milliseconds instead of seconds. Replicas run a function of the caller, named by module or
file; its return value comes back as JSON.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from pollux.testing.ports import free_port
from pollux.testing.waiting import PATIENCE_SECONDS, OutOfTime

__all__ = ["ReplicaResult", "ReplicaServer", "RunningReplicas", "load_module"]

_POLL_SECONDS = 0.005
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TP_SOCKET_IFNAME": "lo",
    "CUDA_VISIBLE_DEVICES": "",
}


@dataclass(frozen=True, slots=True)
class ReplicaResult:
    """How one replica ended: its exit code (negative: the signal that ended it) and what its function returned.

    `error` is the name of the exception that ended it, or empty; `message` is its text. `output` has the end of its
    stdout and stderr.
    """

    exit_code: int
    value: Any
    error: str
    message: str
    output: str


class RunningReplicas:
    """The replicas of one run; `processes` are their process numbers, by replica, valid until `wait` returns."""

    def __init__(self, server: ReplicaServer, processes: Sequence[int], folder: Path) -> None:
        self.processes = tuple(processes)
        self.folder = folder
        self._server = server

    def signal(self, number: int, replica: int | None = None) -> None:
        """Send a signal to one replica, or to all."""
        for index, process in enumerate(self.processes):
            if replica in (None, index):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, number)

    def wait(self, timeout: float = PATIENCE_SECONDS) -> list[ReplicaResult]:
        """Wait until all have ended; those that still run after `timeout` seconds are killed, with exit code -9."""
        codes = self._server.request(op="wait", processes=self.processes, timeout=timeout)["codes"]
        return [self._result(replica, code) for replica, code in enumerate(codes)]

    def _result(self, replica: int, code: int) -> ReplicaResult:
        path = self.folder / f"result-{replica}.json"
        # A replica that was killed may have written no result, or half of one.
        try:
            result = json.loads(path.read_text())
        except (OSError, ValueError):
            result = {}
        # A replica that was killed at once has not opened its file.
        path = self.folder / f"output-{replica}.txt"
        output = path.read_text(errors="replace") if path.exists() else ""
        return ReplicaResult(
            code, result.get("value"), result.get("error", ""), result.get("message", ""), output[-20_000:]
        )


class ReplicaServer:
    """The process that forks replicas; make one for many runs, and close it, or use it in a `with` block.

    A function is named `package.module:function` or `path/to/file.py:function`. Every replica calls it with the given
    arguments and with torchrun's variables; MASTER_ADDR is the loopback.
    """

    def __init__(self, preload: Sequence[str] = ()) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pollux-replicas-")
        self._runs = 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pollux.testing.jobs.replica_server", *preload],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **_ENVIRONMENT},
        )

    def __enter__(self) -> ReplicaServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(
        self,
        function: str,
        num_replicas: int = 1,
        arguments: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> RunningReplicas:
        """Start replicas and return at once."""
        self._runs += 1
        folder = Path(self._folder.name) / str(self._runs)
        folder.mkdir()
        answer = self.request(
            op="start",
            function=function,
            num_replicas=num_replicas,
            arguments=dict(arguments or {}),
            environment={**os.environ, **_ENVIRONMENT, **dict(environment or {})},
            folder=str(folder),
        )
        return RunningReplicas(self, answer["processes"], folder)

    def run(
        self,
        function: str,
        num_replicas: int = 1,
        arguments: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        timeout: float = PATIENCE_SECONDS,
    ) -> list[Any]:
        """The return value of every replica; an AssertionError with the outputs if one failed.

        The error is `OutOfTime` if none failed and some still ran after `timeout` seconds.
        """
        began = time.monotonic()
        results = self.start(function, num_replicas, arguments, environment).wait(timeout)
        late = time.monotonic() - began >= timeout
        bad = [(replica, result) for replica, result in enumerate(results) if result.exit_code != 0]
        if bad:
            told = "\n".join(
                f"replica {replica} of {num_replicas}: exit code {result.exit_code}\n{result.output}"
                for replica, result in bad
            )
            if late and all(result.exit_code == -signal.SIGKILL for _, result in bad):
                raise OutOfTime(f"{function} did not finish within {timeout:g} s\n{told}")
            raise AssertionError(f"{function} failed\n{told}")
        return [result.value for result in results]

    def request(self, **message: Any) -> dict[str, Any]:
        """Send a request to the forking process, and return its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise AssertionError(f"the process that forks replicas ended with code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End all replicas and the process that forks them."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
            try:
                self._process.wait(timeout=PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()
        self._folder.cleanup()


def load_module(name: str) -> Any:
    """The module of a dotted name, or of a file that ends in `.py`; a file is loaded once."""
    if not name.endswith(".py"):
        return importlib.import_module(name)
    key = "pollux_file_" + "".join(letter if letter.isalnum() else "_" for letter in name)
    if key not in sys.modules:
        spec = importlib.util.spec_from_file_location(key, name)
        if spec is None or spec.loader is None:
            raise AssertionError(f"{name} is not a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[key] = module
        spec.loader.exec_module(module)
    return sys.modules[key]


def _function(name: str) -> Callable[..., Any]:
    module, _, function = name.rpartition(":")
    result: Callable[..., Any] = getattr(load_module(module), function)
    return result


def _place(replica: int, num_replicas: int, port: int) -> dict[str, str]:
    """torchrun's variables; a single replica needs none."""
    if num_replicas == 1:
        return {}
    return {
        "RANK": str(replica),
        "LOCAL_RANK": str(replica),
        "WORLD_SIZE": str(num_replicas),
        "LOCAL_WORLD_SIZE": str(num_replicas),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _serve() -> None:
    """Serve the requests on standard input until it is closed. Starts no thread, since forks would not have it."""
    import torch

    import pollux.agent  # noqa: F401

    # PyTorch would import this with the first optimiser, which takes most of a second.
    importlib.import_module("torch._dynamo")
    torch.set_num_threads(1)
    # What is imported is never garbage; collections in the replicas skip it.
    gc.freeze()

    for name in sys.argv[1:]:
        load_module(name)
    living: set[int] = set()
    for line in sys.stdin:
        message = json.loads(line)
        if message["op"] == "start":
            port = free_port()
            for replica in range(message["num_replicas"]):
                # Made before the fork, so that tests can follow it.
                (Path(message["folder"]) / f"output-{replica}.txt").touch()
            processes = [_fork(message, replica, port) for replica in range(message["num_replicas"])]
            living.update(processes)
            answer = {"processes": processes}
        else:
            answer = {"codes": _reap(message["processes"], float(message["timeout"]))}
            living.difference_update(message["processes"])
        print(json.dumps(answer), flush=True)
    _reap(sorted(living), 0.0)


def _reap(processes: Sequence[int], timeout: float) -> list[int]:
    deadline = time.monotonic() + timeout
    codes = {}
    for process in processes:
        while os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if time.monotonic() >= deadline:
                _kill_group(process)
            time.sleep(_POLL_SECONDS)
        # End the replica's children, such as data workers, before its process number can be reused.
        _kill_group(process)
        codes[process] = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    return [codes[process] for process in processes]


def _kill_group(process: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)


def _fork(message: Mapping[str, Any], replica: int, port: int) -> int:
    process = os.fork()
    if process:
        # Parent and child both set it, so that neither can be too late.
        with contextlib.suppress(OSError):
            os.setpgid(process, process)
        return process
    code = 70
    try:
        os.setpgid(0, 0)
        _redirect(Path(message["folder"]) / f"output-{replica}.txt")
        os.environ.clear()
        os.environ.update(message["environment"])
        os.environ.update(_place(replica, message["num_replicas"], port))
        code = _run(message, replica)
    finally:
        os._exit(code)


def _redirect(output: Path) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(nothing, 0)
    os.dup2(file, 1)
    os.dup2(file, 2)


def _run(message: Mapping[str, Any], replica: int) -> int:
    """Call the function and end as a script would: traceback, exit handlers, exit code."""
    result: dict[str, Any] = {}
    code = 0
    try:
        result["value"] = _function(message["function"])(**message["arguments"])
    except BaseException as error:
        result |= {"error": type(error).__name__, "message": str(error)}
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
        if not isinstance(error, SystemExit):
            traceback.print_exc()
    path = Path(message["folder"]) / f"result-{replica}.json"
    try:
        path.write_text(json.dumps(result, default=_plain))
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
        code = code or 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _plain(value: Any) -> Any:
    """Arrays and tensors as lists."""
    return value.tolist()


if __name__ == "__main__":
    _serve()
