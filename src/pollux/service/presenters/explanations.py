"""Why jobs have their GPUs, in the words of `pollux explain`; the same for one job and for every row of a list.

What depends on the job alone is kept with its entry; what depends on other jobs is put in for every answer.
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
# Only jobs in these states were given GPUs, and may wait for others to leave them.
_COMING = (JobState.STARTING, JobState.RESIZING)


class _Pages(Protocol):
    """Says which jobs have a page; the board does."""

    def __contains__(self, job_id: str, /) -> bool: ...


@dataclass(frozen=True, slots=True)
class Explanation:
    """A text, the command that helps next, and the jobs that the text names and that have a page."""

    text: str
    next_step: str
    jobs: tuple[str, ...]


def explanation_of(entry: JobEntry, leaving: str, known: _Pages) -> Explanation:
    """The reason, for whom the job waits to leave (`leaving`, may be empty), and what a change of its GPUs costs."""
    said = entry.explained()
    text = said.cause
    named = list(said.jobs)
    if leaving:
        text = f"{text}; {leaving}"
        named += _QUOTED.findall(leaving)
    if said.cost:
        text = f"{text}. {said.cost[0].upper()}{said.cost[1:]}"
    # Ended jobs too, as long as there is a page of theirs.
    return Explanation(text, said.next_step, tuple(job_id for job_id in dict.fromkeys(named) if job_id in known))


@dataclass(slots=True)
class Explainer:
    """Explains the rows of one answer: what the backend has is looked up once, and only where a row needs it."""

    engine: Engine
    _running: Sequence[Running] | None = field(default=None, init=False)

    def json(self, entry: JobEntry) -> bytes:
        """`"id":{"text":…,"jobs":[…]}`, a member of an object."""
        job_id = entry.record.spec.id
        found = explanation_of(entry, self._leaving(entry, job_id), self.engine.views.board)
        # Ids are of letters that need no care; a whole encoder for each row would take longer than all the rest of it.
        names = ",".join(f'"{name}"' for name in found.jobs)
        return f'"{job_id}":{{"text":{json.dumps(found.text)},"jobs":[{names}]}}'.encode()

    def _leaving(self, entry: JobEntry, job_id: str) -> str:
        if entry.record.state not in _COMING:
            return ""
        if self._running is None:
            found = self.engine.backend.running()
            self._running = [entry for entry in found if entry.state in ("waiting", "stopping")]
        # It may be gone from the list since it was begun.
        return self.engine.leaving_before(job_id, self._running) if job_id in self.engine.views.board else ""
