"""A fleet for tests: node daemons that are processes on the loopback, which tests kill, freeze and add."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pollux.backends.node_daemon.command import daemon_words
from pollux.backends.nodes.provider import LentNode, PooledNodeProvider
from pollux.backends.process import proc
from pollux.core import Node

__all__ = ["ProcessFleet"]

_LOOK_SECONDS = 0.02


class ProcessFleet(PooledNodeProvider):
    """`num_nodes` node daemons with `slots` slots each, in a `folder`; daemons that already run there are used again.

    `watch`: whether it reports by itself that a daemon has ended, as some engines do. Daemons go on after `close` and
    end with the process that started them; `kill_all` ends them at once.
    """

    def __init__(
        self, folder: Path, num_nodes: int = 2, slots: int = 2, watch: bool = True, cold: bool = False
    ) -> None:
        super().__init__()
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._num_nodes = num_nodes
        self._slots = slots
        self._watch = watch
        self._cold = cold
        self._children: set[int] = set()
        self._started: dict[str, int] = {}
        self._halt = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, secret: bytes, head: str, changed: Callable[[], None]) -> None:
        """Find the daemons that run, and start the missing ones."""
        super().start(secret, head, changed)
        for number in range(self._num_nodes):
            if self._announced(f"n{number}") is None:
                self._spawn(f"n{number}")
        self._look()
        self._thread = threading.Thread(target=self._run, name="pollux-process-fleet", daemon=True)
        self._thread.start()

    def _spawn(self, node: str) -> None:
        secret = self.folder / "secret"
        secret.write_text(self.secret.hex())
        secret.chmod(0o600)
        self._file(node).unlink(missing_ok=True)
        words = daemon_words(node, self._slots, "127.0.0.1", self._file(node), warm=not self._cold)
        words += ["--secret-file", str(secret)]
        command = [sys.executable, "-P", *words]
        log = str(self.folder / f"{node}.log")
        # Only the end of this process closes the other end of the pipe; then the daemon ends, too.
        reading, _ = os.pipe2(os.O_CLOEXEC)
        actions: list[tuple[Any, ...]] = [
            (os.POSIX_SPAWN_DUP2, reading, 0),
            (os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ]
        pid = os.posix_spawn(sys.executable, command, os.environ, file_actions=actions, setsid=True)
        os.close(reading)
        self._started[node] = pid
        self._children.add(pid)

    def _file(self, node: str) -> Path:
        return self.folder / f"{node}.json"

    def _announced(self, node: str) -> LentNode | None:
        try:
            told = json.loads(self._file(node).read_text())
        except (OSError, ValueError):
            return None
        began = proc.start_time(told["pid"])
        if began is None or not proc.is_alive(told["pid"], began):
            return None
        cores = float(len(os.sched_getaffinity(0)))
        return LentNode(Node(node, told["places"], "cpu", num_cpus=cores), (told["address"], told["port"]))

    def _run(self) -> None:
        while not self._halt.wait(_LOOK_SECONDS):
            self._look()

    def _look(self) -> None:
        with self._books:
            self._collect()
            known = {hosted.node.id: hosted for hosted in self._hosts}
            names = sorted(path.stem for path in self.folder.glob("n*.json"))
            there = {name: self._announced(name) or (None if self._watch else known.get(name)) for name in names}
        self.offer(hosted for hosted in there.values() if hosted is not None)

    def pid(self, number: int) -> int:
        """The process number of a node's daemon; an OSError before the daemon has announced itself."""
        return int(json.loads(self._file(f"n{number}").read_text())["pid"])

    def processes(self, number: int) -> list[int]:
        """The daemon of a node and all its descendants; empty before the daemon has announced itself."""
        if not self._file(f"n{number}").exists():
            return []
        host = self.pid(number)
        return [host, *proc.descendants(host, proc.process_table())]

    def kill_node(self, number: int) -> None:
        """Send SIGKILL to the daemon and its descendants."""
        proc.kill_all(self.processes(number))

    def freeze_node(self, number: int) -> list[int]:
        """Send SIGSTOP to the daemon and its descendants; returns their process numbers, for `thaw`."""
        frozen = self.processes(number)
        proc.kill_all(frozen, signal.SIGSTOP)
        return frozen

    def thaw(self, frozen: list[int]) -> None:
        """Send SIGCONT to frozen processes."""
        proc.kill_all(frozen, signal.SIGCONT)

    def add_node(self) -> str:
        """Start a daemon under the first free node name; returns that name."""
        with self._books:
            self._collect()
            number = 0
            while self._announced(f"n{number}") is not None or self._started.get(f"n{number}") in self._children:
                number += 1
            self._spawn(f"n{number}")
        return f"n{number}"

    def close(self) -> None:
        """Stop watching; daemons go on."""
        self._halt.set()
        if self._thread is not None:
            self._thread.join()

    def kill_all(self) -> None:
        """End every daemon and its descendants."""
        self.close()
        for path in self.folder.glob("n*.json"):
            with contextlib.suppress(OSError, ValueError):
                self.kill_node(int(path.stem[1:]))
        proc.kill_all(self._children)
        self._collect(0)

    def _collect(self, options: int = os.WNOHANG) -> None:
        for child in [*self._children]:
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(child, options)[0] == 0:
                    continue
            self._children.discard(child)
