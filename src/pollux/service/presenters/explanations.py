"""Explanations of why jobs have their GPUs, as in `pollux explain`, for one job and for the rows of a list.

A job's entry keeps the part that depends on the job alone; the rest is computed for every answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pollux.backends.protocol import Running
from pollux.controller import JobState
from pollux.service.engine.engine import Engine
from pollux.service.views.job_board import JobEntry

__all__ = ["Explainer", "Explanation", "explanation_of"]

_QUOTED = re.compile(r"'([a-z0-9._-]+)'")
# Only jobs in these states may wait for other jobs to leave their GPUs.
_COMING = (JobState.STARTING, JobState.RESIZING)


class _Pages(Protocol):
    """The jobs that have a page, such as the board."""

    def __contains__(self, job_id: str, /) -> bool: ...


@dataclass(frozen=True, slots=True)
class Explanation:
    """A text, the next command to use, and the jobs in the text that have a page."""

    text: str
    next_step: str
    jobs: tuple[str, ...]


def explanation_of(entry: JobEntry, leaving: str, known: _Pages) -> Explanation:
    """The explanation: the reason, the jobs that must leave first (`leaving`), and the cost of a resize."""
    said = entry.explained()
    text = said.cause
    named = list(said.jobs)
    if leaving:
        text = f"{text}; {leaving}"
        named += _QUOTED.findall(leaving)
    if said.cost:
        text = f"{text}. {said.cost[0].upper()}{said.cost[1:]}"
    # Ended jobs too, as long as they have a page.
    return Explanation(text, said.next_step, tuple(job_id for job_id in dict.fromkeys(named) if job_id in known))


@dataclass(slots=True)
class Explainer:
    """Explains the rows of one answer; reads the backend's state once, if a row needs it."""

    engine: Engine
    _running: Sequence[Running] | None = field(default=None, init=False)

    def json(self, entry: JobEntry) -> bytes:
        """`"id":{"text":…,"jobs":[…]}`, a member of an object."""
        job_id = entry.record.spec.id
        found = explanation_of(entry, self._leaving(entry, job_id), self.engine.views.board)
        # Ids need no escapes; an encoder for each row would take longer than everything else.
        names = ",".join(f'"{name}"' for name in found.jobs)
        return f'"{job_id}":{{"text":{json.dumps(found.text)},"jobs":[{names}]}}'.encode()

    def _leaving(self, entry: JobEntry, job_id: str) -> str:
        if entry.record.state not in _COMING:
            return ""
        if self._running is None:
            found = self.engine.backend.running()
            self._running = [entry for entry in found if entry.state in ("waiting", "stopping")]
        # The job may have been forgotten since the list was made.
        return self.engine.leaving_before(job_id, self._running) if job_id in self.engine.views.board else ""
