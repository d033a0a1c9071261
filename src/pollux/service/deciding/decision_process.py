"""The decision process as the service sees it: started, asked, watched while it computes, and ended."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

from pollux.core import Decision, Snapshot
from pollux.core.errors import PolluxError
from pollux.service.deciding.changes import DecisionReader, KeptMemory, SnapshotWriter
from pollux.service.deciding.frames import Frames
from pollux.service.deciding.worker import DECIDED, FAILED, READY

__all__ = ["COMMAND", "DecisionProcess", "PolicyFailed", "ProcessLost", "Watch"]

COMMAND = (sys.executable, "-P", "-c", "from pollux.service.deciding.worker import main; main()")
"""The command of the process; the service's process id and the number of a socket follow."""

_LOOK_SECONDS = 1.0
# A process that computes uses the processor, even on an overloaded machine; one that hangs does not.
_IDLE_SECONDS = 60.0
# The published genetic search takes half a minute for 1,000 jobs.
_LONGEST_SECONDS = 900.0
_TICKS = os.sysconf("SC_CLK_TCK")


class ProcessLost(PolluxError):
    """The decision process ended, or was ended because it hung."""


class PolicyFailed(PolluxError):
    """The policy raised an error; the message has the details."""


class Watch:
    """Raises ProcessLost when a process that should answer hangs: no processor time for a while, or far too much.

    `used` gives its seconds of processor time; None if the system does not count them, and then all time counts.
    """

    def __init__(
        self,
        used: Callable[[], float | None],
        clock: Callable[[], float] = time.monotonic,
        idle_seconds: float = _IDLE_SECONDS,
        longest_seconds: float = _LONGEST_SECONDS,
    ) -> None:
        self._used, self._clock = used, clock
        self._idle_seconds, self._longest_seconds = idle_seconds, longest_seconds
        self.begin()

    def begin(self) -> None:
        """Note that the process is asked now."""
        self._active_at = self._began_at = self._clock()
        self._at_begin = self._last = self._used()

    def look(self) -> None:
        """Check the process, which has not answered yet."""
        now, used = self._clock(), self._used()
        if used is None or self._at_begin is None:
            spent, idle = now - self._began_at, 0.0
        else:
            if used != self._last:
                self._active_at, self._last = now, used
            spent, idle = used - self._at_begin, now - self._active_at
        if idle >= self._idle_seconds:
            raise ProcessLost(f"it has used no processor time for {idle:.0f} s and not answered")
        if spent >= self._longest_seconds:
            raise ProcessLost(f"it has computed for {spent:.0f} s and not answered")


def _processor_seconds(pid: int) -> float | None:
    """Processor time of a process so far; None if the system does not say."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rsplit(b")", 1)[1].split()
    except (OSError, IndexError):
        return None
    return (int(fields[11]) + int(fields[12])) / _TICKS


class DecisionProcess:
    """One process. All calls come from the thread that made it, except `kill`.

    OSError if it cannot be started, ProcessLost if it ends. It ends at the latest with that thread.
    """

    def __init__(self, policy: bytes, command: tuple[str, ...] = COMMAND) -> None:
        ours, theirs = socket.socketpair()
        try:
            # Its errors go where the service's go.
            self._process = subprocess.Popen(
                [*command, str(os.getpid()), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.pid = self._process.pid
        self._watch = Watch(lambda: _processor_seconds(self.pid))
        self._frames = Frames(ours, self._watch.look, _LOOK_SECONDS)
        self._writer, self._reader = SnapshotWriter(), DecisionReader()
        self._known_memory = 0
        self._is_ready = False
        with self._told_when_lost():
            self._frames.send(policy)

    @contextlib.contextmanager
    def _told_when_lost(self) -> Iterator[None]:
        try:
            yield
        except (OSError, EOFError) as error:
            self.end()
            raise ProcessLost(f"it ended with code {self._process.returncode}") from error
        except BaseException:
            self.end()
            raise

    def is_ready(self, wait: bool = False) -> bool:
        """Whether it can be asked; with `wait`, waits until it can."""
        if self._is_ready:
            return True
        with self._told_when_lost():
            if not wait and not self._frames.has_news():
                self._watch.look()
                return False
            if self._frames.receive() != READY:
                raise ProcessLost("its first message was not the one that is expected")
        self._is_ready = True
        return True

    def decide(self, snapshot: Snapshot) -> Decision:
        """The policy's answer; PolicyFailed if the policy raises an error."""
        self.is_ready(wait=True)
        with self._told_when_lost():
            self._watch.begin()
            self._frames.send(self._writer.write(snapshot, self._known_memory))
            answer = self._frames.receive()
            if answer.startswith(DECIDED):
                decision = self._reader.read(answer[len(DECIDED) :], snapshot)
                assert isinstance(decision.memory, KeptMemory)
                self._known_memory = decision.memory.number
                return decision
        raise PolicyFailed(answer[len(FAILED) :].decode(errors="replace"))

    def kill(self) -> None:
        """Kill the process; a thread that waits for it gets ProcessLost. Callable from any thread."""
        self._process.kill()

    def end(self) -> None:
        """End it, and wait until it is gone."""
        self._process.kill()
        self._process.wait()
        self._frames.close()
