"""Tells the next start which local batches ran out of memory and ended the process.

It does so in two files in the checkpoint folder.

A process ends where the script's own code runs out of memory, or where a step cannot be dropped; `step.oom` handles all
other cases.
"""

from __future__ import annotations

import contextlib
import json
import logging
from pathlib import Path
from typing import Any, NamedTuple

from pollux.storage.state_file import read_json, write_state

__all__ = ["Lesson", "TrialNotes"]

_log = logging.getLogger("pollux")
_TRIAL = ".trial.json"
_LIMITS = ".out-of-memory.json"
# A kill may hit a trial by chance; where the same trial dies twice, it is the cause.
_DEATHS = 2


class Lesson(NamedTuple):
    """The local batch that ended an earlier start, and the largest to run with instead."""

    local_batch: int
    largest: int


class TrialNotes:
    """Trials by GPU type. They are not part of checkpoints, whose state is from before the trial.

    An out-of-memory error counts at once. A death without a reason, such as SIGKILL, counts only with `counts_deaths`,
    above a batch that ran, when the same trial dies a second time. A note that cannot be written is logged once.
    """

    def __init__(self, folder: Path, gpu_type: str, counts_deaths: bool) -> None:
        self._folder = folder
        self._gpu_type = gpu_type
        self._counts_deaths = counts_deaths
        self._trying: Lesson | None = None
        self._said = False

    def note_trial(self, local_batch: int, held: int, writes: bool = True) -> None:
        """Note that a step begins at a local batch that never ran; `held` is the largest that ran, 0 for none."""
        self._trying = Lesson(local_batch, held or max(local_batch // 2, 1))
        if not (writes and self._counts_deaths and held):
            return
        before = self._read(_TRIAL)
        same = (before.get("gpu_type"), before.get("local_batch")) == (self._gpu_type, local_batch)
        self._write(_TRIAL, self._trial(self._trying, before.get("deaths", 0) if same else 0, is_open=True))

    def clear_trial(self, writes: bool = True) -> None:
        """Remove the note: the trial is over, and this process lives."""
        if self._trying is not None and writes and self._counts_deaths:
            with contextlib.suppress(OSError):
                (self._folder / _TRIAL).unlink(missing_ok=True)
        self._trying = None

    def note_out_of_memory(self) -> None:
        """Note that memory ran out and ends this process; only in a trial, where the batch is the cause."""
        if self._trying is not None:
            self._learn(self._trying)
            self.clear_trial()

    def learned(self, writes: bool = True) -> Lesson | None:
        """What earlier starts learned on this GPU type; called once at the start, with `writes` on one replica."""
        if writes:
            self._count_death()
        known = self._read(_LIMITS).get(self._gpu_type)
        if not isinstance(known, list) or len(known) != 2 or not all(isinstance(n, int) and n > 0 for n in known):
            return None
        return Lesson(*known)

    def _count_death(self) -> None:
        note = self._read(_TRIAL)
        numbers: list[Any] = [note.get(name) for name in ("local_batch", "largest", "deaths")]
        if not note.get("open") or note.get("gpu_type") != self._gpu_type:
            return
        if not all(isinstance(number, int) for number in numbers):
            return
        tried, deaths = Lesson(*numbers[:2]), numbers[2]
        if deaths + 1 >= _DEATHS:
            self._learn(tried)
        self._write(_TRIAL, self._trial(tried, deaths + 1, is_open=False))

    def _trial(self, tried: Lesson, deaths: int, is_open: bool) -> dict[str, Any]:
        return {"gpu_type": self._gpu_type, **tried._asdict(), "deaths": deaths, "open": is_open}

    def _learn(self, lesson: Lesson) -> None:
        self._write(_LIMITS, {**self._read(_LIMITS), self._gpu_type: lesson})

    def _read(self, name: str) -> dict[str, Any]:
        found = read_json(self._folder / name)
        return found if isinstance(found, dict) else {}

    def _write(self, name: str, values: dict[str, Any]) -> None:
        try:
            write_state(self._folder / name, json.dumps(values).encode(), durable=False, mode=0o666)
        except OSError as error:
            if not self._said:
                self._said = True
                _log.warning("notes of batches that memory may not hold cannot be kept in %s: %s", self._folder, error)
