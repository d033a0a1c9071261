"""Whose checkpoints are in a store: a small object there says so, since a store of objects knows no locks.

It is beaten like a heart while its holder lives, and says so when it was given back. Clocks of machines are never
compared: whether a holder lives is seen from its beats. A process of the same job takes it over at once, unless the job
has been started anew since; whoever has lost it once writes no more. Each holder has a higher term than the one before:
what an earlier one wrote late, since a store has no order either, is written over by the later one.
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
    """The job that a process belongs to: `run` is the same over all its starts and empty where nobody counts them.

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

    `released`: its holder has given it back, and nobody but an earlier start of its job is kept out by it.
    """

    token: str = ""
    owner: str = "somebody who writes in another way"
    holder: Holder = Holder()
    place: str = ""
    term: int = 0
    beats: int = 0
    released: bool = False

    @classmethod
    def read(cls, content: bytes) -> _Note:
        """What cannot be understood is somebody else's, and changes where it does."""
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
    """Held from the constructor, which waits for one that may be dead, to `release`. `MisusedJob`: somebody else's.

    `place` is the locked folder of the copies: whoever held the lease from there is dead, or it were locked.
    `handed_over`: one that trains with this process held it until now, and may still be writing.
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
        if found is not None and not self._yields(found):
            found = self._watch(found)
        self._took_over = found is not None and not found.released
        self._note = replace(self._note, term=1 if found is None else found.term + 1)
        self._write(self._note)
        self.require()
        self._thread = threading.Thread(target=self._beat, name="pollux-lease", daemon=True)
        self._thread.start()

    def require(self) -> None:
        """Raise `MisusedJob` where somebody else has taken it since, now or at any time before."""
        found = None if self._lost else self._read()
        is_late = found is None or self._is_late(found)
        if found is not None and not is_late and not self._is_ours(found):
            self._lose(found)
        if self._lost:
            raise MisusedJob(
                f"{self._store.address} was taken over by {self._lost}; this process writes no more checkpoints there"
            )
        if is_late:
            # So is what was removed by hand, say: what is not there keeps nobody out.
            self._write(self._note)

    def release(self) -> None:
        """Let others have it. In a forked process, which holds nothing, this does nothing."""
        if os.getpid() != self._process or self._ends.is_set():
            return
        self._ends.set()
        # It may be waiting for a store that does not answer.
        self._thread.join(_END_SECONDS)
        with contextlib.suppress(PolluxError):
            found = self._read()
            if found is not None and (found.token == self._note.token or self._is_late(found)):
                # Not removed: an earlier start of the job, cut off until now, is to see that it has gone on.
                self._write(replace(self._note, released=True))

    def _is_ours(self, found: _Note) -> bool:
        """Whether it is this process's, or that of one that trains with it."""
        return found.token == self._note.token or self._note.holder.trains_with(found.holder)

    def _is_late(self, found: _Note) -> bool:
        """Whether that was written by one of before, after this one had taken over."""
        ours = self._note.holder
        if found.token == self._note.token or ours.is_before(found.holder):
            return False
        # What cannot be understood has no term.
        return found.holder.is_before(ours) or 0 < found.term < self._note.term

    def _lose(self, found: _Note) -> None:
        if not self._lost:
            self._lost = found.owner
            _logger.error("%s was taken over by %s", self._store.address, found.owner)

    def _yields(self, found: _Note) -> bool:
        """Whether it may be taken from that holder at once."""
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

    def _watch(self, found: _Note) -> _Note | None:
        """Wait until the holder has let go or is seen to be dead; `MisusedJob` as soon as it is seen to live.

        What it says last is returned.
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
        # Whoever it was taken from may be writing at that very moment: then it is taken again soon.
        pause = min(_LOOK_SECONDS, self._beat_seconds) if self._took_over else self._beat_seconds
        while not self._ends.wait(pause):
            pause = self._beat_seconds
            try:
                found = self._read()
                if found is not None and found.token != self._note.token and not self._is_late(found):
                    if not self._is_ours(found):
                        self._lose(found)
                    if self._lost:
                        return
                    if not found.released:
                        continue
                    # One that trains with this one has it no more, and this one has not ended.
                    self._note = replace(self._note, term=found.term + 1)
                self._note = replace(self._note, beats=self._note.beats + 1)
                self._write(self._note)
            except PolluxError as error:
                # Another may take it for dead; whether that is so is asked before anything is published.
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
