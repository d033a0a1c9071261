"""Runs the driver, the process that speaks to Ray: exchanges lines with it, and starts it again when it has ended."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pollux.backends.ray.driver_messages import (
    MAX_LINE_BYTES,
    ConnectedMessage,
    DriverMessage,
    DriverOrder,
    DriverRequest,
    TroubleMessage,
    UnreachableMessage,
    WellMessage,
    decode_message,
    encode_line,
)
from pollux.backends.transport.json_lines import LineReader
from pollux.core.errors import PolluxError
from pollux.storage.foreign_file import open_inside
from pollux.storage.state_file import open_log

__all__ = ["DRIVER", "DriverClient"]

DRIVER = (sys.executable, "-P", "-m", "pollux.backends.ray.driver")
"""The command of the process that speaks to Ray."""

_log = logging.getLogger("pollux.backends")

_CONNECT_SECONDS = 120.0
_SILENCE_SECONDS = 8.0
_GIVE_UP_SECONDS = 60.0
_LONGEST_PAUSE_SECONDS = 15.0
_END_SECONDS = 5.0
_LOG_BYTES = 1_000_000
_LISTEN_SECONDS = 0.5
_LOOKED_THROUGH_BYTES = 100_000
# Ray writes this word to its log, goes on trying for 20 seconds, and then reports only that it failed to connect.
_TOKEN_REFUSED = b"InvalidAuthToken"
_TOKEN = "authentication token"
_REMEDY = "check 'ray status' and --address"
_TOKEN_REMEDY = (
    "start the service with RAY_AUTH_MODE=token and with the cluster's token in RAY_AUTH_TOKEN, or in the file that "
    "RAY_AUTH_TOKEN_PATH names"
)


class DriverClient:
    """Keeps a driver running from `start` to `close`; `hear` gets each of its messages, in the client's own thread.

    `order` makes the first line for a new driver. Requests without a driver are lost: the next first line has them.
    """

    def __init__(
        self,
        order: Callable[[], DriverOrder],
        hear: Callable[[DriverMessage], None],
        log: Path,
        command: tuple[str, ...] = DRIVER,
    ) -> None:
        self._order, self._hear, self._log, self._command = order, hear, log, command
        self._closing = threading.Event()
        self._outbox: queue.SimpleQueue[bytes | None] | None = None
        self._guard = threading.Lock()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._reached_once = False
        self._log_begins = 0
        self.is_connected = False
        self.trouble = ""

    def start(self) -> None:
        """Start the thread that keeps a driver running."""
        self._thread = threading.Thread(target=self._keep, daemon=True, name="pollux-ray")
        self._thread.start()

    def send(self, request: DriverRequest) -> None:
        """Send a request to the driver, if there is one."""
        with self._guard:
            if self._outbox is not None:
                self._outbox.put(encode_line(request))

    def close(self) -> None:
        """End the driver and the thread."""
        self._closing.set()
        with self._guard:
            if self._outbox is not None:
                self._outbox.put(None)
        if self._thread is not None:
            self._thread.join(2 * _END_SECONDS)

    def _keep(self) -> None:
        pause = 0.5
        while not self._closing.is_set():
            self.is_connected = False
            try:
                self._run_once()
            except Exception:
                _log.exception("the driver of Ray could not be followed; it is started again")
            if self._closing.is_set():
                return
            pause = 0.5 if self.is_connected else min(2 * pause, _LONGEST_PAUSE_SECONDS)
            self.is_connected = False
            self._complain()
            self._closing.wait(pause)

    def _complain(self, why: str = "") -> None:
        """Note and log what is wrong, and tell the backend of new trouble."""
        before = self.trouble
        if why or not before:
            went = "lost the connection to Ray" if self._reached_once else "Ray cannot be reached"
            why = why or self._last_words()
            remedy = _TOKEN_REMEDY if _TOKEN in why.lower() else _REMEDY
            self.trouble = f"{went} ({why}): {remedy}; trying again"
        if self.trouble != before:
            _log.warning("%s", self.trouble)
            self._hear(TroubleMessage())

    def _run_once(self) -> None:
        """Run one driver from its start to its end."""
        ours, theirs = socket.socketpair()
        ours.settimeout(_LISTEN_SECONDS)
        with ours:
            with theirs, self._opened_log() as log:
                self._log_begins = log.tell()
                process = subprocess.Popen(
                    self._command, stdin=subprocess.PIPE, stdout=theirs.fileno(), stderr=log, env=_environ(),
                    start_new_session=True,
                )  # fmt: skip
            self._follow(process, LineReader(ours, MAX_LINE_BYTES))

    def _follow(self, process: subprocess.Popen[bytes], reader: LineReader) -> None:
        outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        with self._guard:
            self._outbox = outbox
        # Made after the outbox is open: a request that comes now may be sent twice, which does no harm; it is not lost.
        first = encode_line(self._order())
        writer = threading.Thread(target=_write, args=(process, first, outbox), daemon=True, name="pollux-ray-out")
        writer.start()
        try:
            self._listen(reader)
        finally:
            with self._guard:
                self._outbox = None
            outbox.put(None)
            _end(process)
            writer.join(_END_SECONDS)

    def _listen(self, reader: LineReader) -> None:
        """Handle the driver's lines until it ends, or is silent for too long."""
        heard_at = time.monotonic()
        while not self._closing.is_set() and (lines := reader.lines()) is not None:
            for line in lines:
                self._hear_line(line)
            if lines:
                heard_at = time.monotonic()
            elif self._is_silent_too_long(time.monotonic() - heard_at):
                return

    def _is_silent_too_long(self, seconds: float) -> bool:
        """Report what is wrong with a driver that has been silent for this time; whether to give it up."""
        if not self.is_connected:
            if why := self._refused_token():
                self._complain(why)
            return seconds > _CONNECT_SECONDS
        if seconds > _SILENCE_SECONDS:
            self._complain("it does not answer")
        return seconds > _GIVE_UP_SECONDS

    def _hear_line(self, line: bytes) -> None:
        match message := decode_message(line):
            case ConnectedMessage():
                self.is_connected = self._reached_once = True
            case UnreachableMessage():
                self._complain(self._refused_token() or message.why)
            case WellMessage():
                if self.trouble:
                    _log.info("Ray answers again")
                    self.trouble = ""
                    self._hear(TroubleMessage())
            case _:
                self._hear(message)

    def _refused_token(self) -> str:
        """A sentence if the driver's log shows that Ray refused its token; else empty."""
        try:
            with open_inside(self._log.parent, self._log.name) as log:
                log.seek(self._log_begins)
                if _TOKEN_REFUSED not in log.read(_LOOKED_THROUGH_BYTES):
                    return ""
        except (OSError, PolluxError):
            return ""
        if os.environ.get("RAY_AUTH_MODE", "").lower() == "token":
            return f"it does not know the {_TOKEN} that it was shown"
        return f"it wants an {_TOKEN}, and none is shown while RAY_AUTH_MODE is not token"

    def _last_words(self) -> str:
        """The last line of the driver's log."""
        try:
            with open_inside(self._log.parent, self._log.name) as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - 2000))
                lines = log.read(2000).decode("utf-8", "replace").split("\n")
        except (OSError, PolluxError):
            lines = []
        said = [line.strip() for line in lines if line.strip()]
        return f"its driver ended: {said[-1][:200]}" if said else "its driver ended"

    def _opened_log(self) -> Any:
        """The driver's log, open for writing; begun anew where it has grown long."""
        try:
            return os.fdopen(open_log(self._log, _LOG_BYTES), "ab")
        except OSError:
            return open(os.devnull, "wb")


def _environ() -> dict[str, str]:
    """The service's environment without its own settings and tokens."""
    return {name: value for name, value in os.environ.items() if not name.startswith("POLLUX_")}


def _write(process: subprocess.Popen[bytes], first: bytes, outbox: queue.SimpleQueue[bytes | None]) -> None:
    assert process.stdin is not None
    line: bytes | None = first
    with contextlib.suppress(OSError):
        while line is not None:
            process.stdin.write(line)
            process.stdin.flush()
            line = outbox.get()
    with contextlib.suppress(OSError):
        process.stdin.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait a short time for the driver's end, which follows the end of its input; then kill it."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_SECONDS)
    process.kill()
    process.wait()
