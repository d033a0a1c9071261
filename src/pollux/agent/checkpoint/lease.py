"""A lease on the checkpoints in a store: a small object there names its holder, since object stores have no locks.

The holder counts heartbeats up in the object while it lives, and marks the object when it releases the lease. Clocks of
machines are never compared: whether a holder lives is seen from its heartbeats. A process of the same job takes the
lease over at once, unless a later start of the job has it. A process that has lost the lease writes no more. Each
holder has a higher term than the one before: it writes over what an earlier holder wrote late.
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
"""Name of the object."""

BEAT_SECONDS = 10.0
"""How often a holder says that it lives; one that is silent for three times as long is taken for dead."""

_PATIENCE = 3
_LOOK_SECONDS = 1.0
_END_SECONDS = 5.0
_logger = logging.getLogger("pollux")


@dataclass(frozen=True, slots=True)
class Holder:
    """The job that a process belongs to: `run` is the same over all its starts, and empty where they are not counted.

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
    """What the object says; `place` names the folder of the copies on one machine, see `place_of_lock`.

    `released`: its holder has released it, so that it keeps out only earlier starts of the same job.
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
        """The note in an object; one that cannot be understood is another process's, with its content as the token."""
        try:
            entries = json.loads(content)
            known = {name: entries[name] for name in ("token", "owner", "place", "term", "beats", "released")}
            holder = Holder(*(entries["holder"][name] for name in ("run", "launch", "generation")))
            return cls(holder=holder, **known)
        except (ValueError, TypeError, KeyError):
            return cls(token=content[:200].hex())


def place_of_lock(lock: int) -> str:
    """A name for a locked file that no other machine and no other file has, for as long as this machine is up."""
    status = os.fstat(lock)
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
    except OSError:
        return ""
    return f"{boot}:{status.st_dev}:{status.st_ino}"


class Lease:
    """Held from the constructor, which waits for one that may be dead, to `release`. `MisusedJob`: another has it.

    `place` is the folder of the copies, which this process has locked: an earlier holder from there must be dead.
    `handed_over`: a process that trains with this one held the lease until now, and may still be writing.
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
        """Raise `MisusedJob` where another process has taken the lease since, now or at any time before."""
        found = None if self._lost else self._read()
        is_late = found is None or self._is_late(found)
        if found is not None and not is_late and not self._is_ours(found):
            self._note_loss(found)
        if self._lost:
            raise MisusedJob(
                f"{self._store.address} was taken over by {self._lost}; this process writes no more checkpoints there"
            )
        if is_late:
            # The object may also have been removed by hand: without it no other process is kept out.
            self._write(self._note)

    def release(self) -> None:
        """Let others have it. In a forked process, which holds nothing, this does nothing."""
        if os.getpid() != self._process or self._ends.is_set():
            return
        self._ends.set()
        # The thread may be waiting for a store that does not answer.
        self._thread.join(_END_SECONDS)
        with contextlib.suppress(PolluxError):
            found = self._read()
            if found is not None and (found.token == self._note.token or self._is_late(found)):
                # Not removed: an earlier start of the job that was cut off must see that the job has gone on.
                self._write(replace(self._note, released=True))

    def _is_ours(self, found: _Note) -> bool:
        """Whether the note is this process's, or that of one that trains with it."""
        return found.token == self._note.token or self._note.holder.trains_with(found.holder)

    def _is_late(self, found: _Note) -> bool:
        """Whether an earlier holder wrote the note after this process had taken the lease over."""
        ours = self._note.holder
        if found.token == self._note.token or ours.is_before(found.holder):
            return False
        # What cannot be understood has no term.
        return found.holder.is_before(ours) or 0 < found.term < self._note.term

    def _note_loss(self, found: _Note) -> None:
        if not self._lost:
            self._lost = found.owner
            _logger.error("%s was taken over by %s", self._store.address, found.owner)

    def _can_be_taken(self, found: _Note) -> bool:
        """Whether the lease may be taken from that holder at once."""
        ours = self._note.holder
        if ours.is_before(found.holder):
            raise MisusedJob(
                f"{self._store.address} is held by {found.owner}, a later start of this job; this one is to end"
            )
        if ours.trains_with(found.holder):
            self.handed_over = not found.released
            return True
        same_run = bool(ours.run) and ours.run == found.holder.run
        return found.released or same_run or bool(found.place and found.place == self._note.place)

    def _await_release(self, found: _Note) -> _Note | None:
        """Wait until the holder releases the lease or must be dead; `MisusedJob` as soon as it is seen to live.

        Returns its last note.
        """
        seconds = _PATIENCE * self._beat_seconds
        _logger.warning(
            "%s is held by %s: it is taken over unless that one shows within %.0f s that it lives",
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
        # The holder before may be writing at this very moment: then the lease is taken again soon.
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
                # Another process may take this one for dead; that is checked before anything is published.
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
