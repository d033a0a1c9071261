"""The output of the replicas of a generation: one log for each rank, written in bounded pieces."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from pollux.backends.process.launcher import ReplicaProcess
from pollux.backends.process.log_file import LogWriter

__all__ = ["RankLogs", "ReplicaLog"]

_READ_BYTES = 64 << 10
_FLOOD_BYTES = 4 << 20
_FLOOD_SECONDS = 0.25
_TAIL_BYTES = 8 << 10
_DRAIN_PIECES = 1024


@dataclass(slots=True)
class ReplicaLog:
    """Writes one replica's output to the log of its rank. `tail` is the end of this replica's output under any rank."""

    of_rank: LogWriter
    tail: bytes = b""

    def write(self, piece: bytes) -> None:
        """Append."""
        self.tail = (self.tail + piece)[-_TAIL_BYTES:]
        self.of_rank.write(piece)


class _Writer(Protocol):
    """The parts of a replica that are needed to read its output."""

    number: int
    process: ReplicaProcess
    log: ReplicaLog


@dataclass(slots=True)
class RankLogs:
    """The logs of all ranks below `folder`. `flooded_until`: until then no output is read, as there was too much."""

    folder: Path
    cap_bytes: int
    flooded_until: float | None = None
    _writers: dict[int, LogWriter] = field(default_factory=dict)
    _read_bytes: dict[int, int] = field(default_factory=dict)
    _window_began: float = 0.0

    def writer_of(self, rank: int) -> LogWriter:
        """The one writer of a rank, for all replicas that have it in turn: two would both rotate a full file."""
        if rank not in self._writers:
            self._writers[rank] = LogWriter(self.folder / f"{rank}.log", self.cap_bytes)
        return self._writers[rank]

    def read(self, replica: _Writer) -> None:
        """Read a bounded piece of a replica's output; stop reading for a while after too much of it."""
        process = replica.process
        try:
            piece = os.read(process.output, _READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        if not piece:
            process.close_output()
            return
        replica.log.write(piece)
        now = time.monotonic()
        if now - self._window_began > _FLOOD_SECONDS:
            self._window_began = now
            self._read_bytes.clear()
        self._read_bytes[replica.number] = self._read_bytes.get(replica.number, 0) + len(piece)
        if self._read_bytes[replica.number] > _FLOOD_BYTES:
            self.flooded_until = self._window_began + _FLOOD_SECONDS

    def change_rank(self, replica: _Writer, rank: int) -> None:
        """Write the replica's output to the log of that rank from now on; what is in its pipe goes to the old log."""
        _read_out(replica, 1)
        replica.log.of_rank = self.writer_of(rank)

    def drain(self, replicas: Iterable[_Writer]) -> None:
        """Read what is left of the output of replicas that have ended, and close all pipes and logs."""
        for replica in replicas:
            _read_out(replica, _DRAIN_PIECES)
            replica.process.close_output()
        self.close(())

    def close(self, but: Collection[int]) -> None:
        """Close the files of all ranks but these."""
        for rank in self._writers.keys() - set(but):
            self._writers[rank].close()


def _read_out(replica: _Writer, pieces: int) -> None:
    """Read at most this many pieces that are there already; the pipe stays open, even at its end."""
    for _ in range(pieces):
        if replica.process.output < 0:
            return
        try:
            piece = os.read(replica.process.output, _READ_BYTES)
        except OSError:
            return
        if not piece:
            return
        replica.log.write(piece)
