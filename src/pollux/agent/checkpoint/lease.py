"""A lease on the checkpoints in a store: a small object names its holder, since object stores have no locks.

While the holder lives it counts its heartbeats in the object, and when it releases the lease it marks the object. The
heartbeats alone show whether a holder lives: clocks of machines are never compared. A process of the same job may take
the lease over at once, unless a later start of the job has it. A process that has lost the lease writes no more. Each
holder has a higher term than the one before, so that it can overwrite what an earlier holder wrote late.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import threading
import time
from dataclasses import asdict, dataclass, replace

from pollux.core.errors import InvalidInput, MisusedJob, PolluxError
from pollux.storage.object_store import ObjectStore

__all__ = ["BEAT_SECONDS", "LEASE_NAME", "Holder", "Lease", "place_of_lock"]

LEASE_NAME = ".lease.json"
"""Name of the object in the store."""

BEAT_SECONDS = 10.0
"""Seconds between two heartbeats; a holder without one for three times as long counts as dead."""

_PATIENCE = 3
_LOOK_SECONDS = 1.0
_END_SECONDS = 5.0
_logger = logging.getLogger("pollux")


@dataclass(frozen=True, slots=True)
class Holder:
    """The job that a process belongs to: `run` is the same in all its starts; empty where starts are not told apart.

    `launch` is the same for all processes that train together; a later start has a higher `generation`.
    """

    run: str = ""
    launch: str = ""
    generation: int = 0

    def trains_with(self, other: Holder) -> bool:
        """Whether processes of both train together."""
        return bool(self.run) and (self.run, self.launch) == (other.run, other.launch)

    def is_before(self, other: Holder) -> bool:
        """Whether the other is a later start of the same job."""
        return bool(self.run) and self.run == other.run and self.generation < other.generation


@dataclass(frozen=True, slots=True)
class _Note:
    """The content of the object; `place` names the folder of the copies on one machine, see `place_of_lock`.

    `released`: the holder has released the lease, which then keeps out only earlier starts of the same job.
    """

    token: str = ""
    owner: str = "a process whose note cannot be read"
    holder: Holder = Holder()
    place: str = ""
    term: int = 0
    beats: int = 0
    released: bool = False

    @classmethod
    def read(cls, content: bytes) -> _Note:
        """The note in an object; unreadable content is the note of another process, with the content as its token."""
        try:
            entries = json.loads(content)
            known = {name: entries[name] for name in ("token", "owner", "place", "term", "beats", "released")}
            holder = Holder(*(entries["holder"][name] for name in ("run", "launch", "generation")))
            return cls(holder=holder, **known)
        except (ValueError, TypeError, KeyError):
            return cls(token=content[:200].hex())


def place_of_lock(lock: int) -> str:
    """A name for a locked file that is unique over all machines and files while this machine is up."""
    status = os.fstat(lock)
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
    except OSError:
        return ""
    return f"{boot}:{status.st_dev}:{status.st_ino}"


class Lease:
    """The lease, held from the constructor to `release`; `MisusedJob` where another process has it.

    The constructor waits where the holder may be dead. `place` is the folder of the copies, which this process has
    locked: an earlier holder with the same place must be dead. `handed_over`: until now a process that trains with this
    one held the lease, and it may still be writing.
    """

    def __init__(self, store: ObjectStore, holder: Holder, place: str = "", beat_seconds: float = BEAT_SECONDS) -> None:
        owner = f"process {os.getpid()} on {socket.gethostname()}"
        self.handed_over = False
        self._store = store
        self._note = _Note(secrets.token_hex(8), owner, holder, place)
        self._beat_seconds = beat_seconds
        self._process = os.getpid()
        self._ends = threading.Event()
        self._lost = ""
        found = self._read()
        if found is not None and not self._can_be_taken(found):
            found = self._await_release(found)
        self._took_over = found is not None and not found.released
        self._note = replace(self._note, term=1 if found is None else found.term + 1)
        self._write(self._note)
        self.require()
        self._thread = threading.Thread(target=self._beat, name="pollux-lease", daemon=True)
        self._thread.start()

    def require(self) -> None:
        """Raise `MisusedJob` where another process has the lease, or once had it since this one took it."""
        found = None if self._lost else self._read()
        is_late = found is None or self._is_late(found)
        if found is not None and not is_late and not self._is_ours(found):
            self._note_loss(found)
        if self._lost:
            raise MisusedJob(
                f"{self._store.address} was taken over by {self._lost}; this process writes no more checkpoints there"
            )
        if is_late:
            # The object may have been removed by hand, and without it no other process is kept out.
            self._write(self._note)

    def release(self) -> None:
        """Release the lease; does nothing in a forked process, which does not hold it."""
        if os.getpid() != self._process or self._ends.is_set():
            return
        self._ends.set()
        # The thread may be waiting for a store that does not answer.
        self._thread.join(_END_SECONDS)
        with contextlib.suppress(PolluxError):
            found = self._read()
            if found is not None and (found.token == self._note.token or self._is_late(found)):
                # The object stays: an earlier start of the job that was cut off must see that a later one has run.
                self._write(replace(self._note, released=True))

    def _is_ours(self, found: _Note) -> bool:
        """Whether this process, or one that trains with it, wrote the note."""
        return found.token == self._note.token or self._note.holder.trains_with(found.holder)

    def _is_late(self, found: _Note) -> bool:
        """Whether an earlier holder wrote the note, after this process had taken the lease over."""
        ours = self._note.holder
        if found.token == self._note.token or ours.is_before(found.holder):
            return False
        # An unreadable note has no term.
        return found.holder.is_before(ours) or 0 < found.term < self._note.term

    def _note_loss(self, found: _Note) -> None:
        if not self._lost:
            self._lost = found.owner
            _logger.error("%s was taken over by %s", self._store.address, found.owner)

    def _can_be_taken(self, found: _Note) -> bool:
        """Whether the lease may be taken from that holder at once."""
        ours = self._note.holder
        if ours.is_before(found.holder):
            raise MisusedJob(f"{self._store.address} is held by {found.owner}, a later start of this job; end this one")
        if ours.trains_with(found.holder):
            self.handed_over = not found.released
            return True
        same_run = bool(ours.run) and ours.run == found.holder.run
        return found.released or same_run or bool(found.place and found.place == self._note.place)

    def _await_release(self, found: _Note) -> _Note | None:
        """Wait until the holder releases the lease, or must be dead; returns its last note.

        `MisusedJob` as soon as there is a heartbeat.
        """
        seconds = _PATIENCE * self._beat_seconds
        _logger.warning(
            "%s is held by %s: this process takes it over unless that one gives a sign of life within %.0f s",
            self._store.address, found.owner, seconds,
        )  # fmt: skip
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(min(_LOOK_SECONDS, self._beat_seconds / 2))
            now = self._read()
            if now is None or now.released:
                return now
            if (now.token, now.beats) != (found.token, found.beats):
                raise MisusedJob(
                    f"{self._store.address} is in use by {now.owner}; end that job, or give this one another address"
                )
        return found

    def _beat(self) -> None:
        # The earlier holder may be writing at this moment: then this process soon writes its note again.
        pause = min(_LOOK_SECONDS, self._beat_seconds) if self._took_over else self._beat_seconds
        while not self._ends.wait(pause):
            pause = self._beat_seconds
            try:
                found = self._read()
                if found is not None and found.token != self._note.token and not self._is_late(found):
                    if not self._is_ours(found):
                        self._note_loss(found)
                    if self._lost:
                        return
                    if not found.released:
                        continue
                    # A process that trains with this one has released the lease, and this one still needs it.
                    self._note = replace(self._note, term=found.term + 1)
                self._note = replace(self._note, beats=self._note.beats + 1)
                self._write(self._note)
            except PolluxError as error:
                # Another process may take the lease over; `require` finds that out before anything is published.
                _logger.warning("the hold on %s could not be renewed: %s", self._store.address, error)

    def _read(self) -> _Note | None:
        try:
            return _Note.read(self._store.read(LEASE_NAME))
        except FileNotFoundError:
            return None

    def _write(self, note: _Note) -> None:
        try:
            self._store.write(LEASE_NAME, json.dumps(asdict(note)).encode())
        except FileNotFoundError as error:
            raise InvalidInput(
                f"{self._store.address}: its bucket does not exist ({error}): create it first"
            ) from error
