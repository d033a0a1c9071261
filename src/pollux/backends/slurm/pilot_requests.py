"""Submits arrays of pilots to Slurm: smaller arrays after a refusal, none on nodes that cannot be used."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from pollux.backends.slurm.parse import PilotRow
from pollux.backends.slurm.queue_view import QueueView
from pollux.backends.slurm.script import PILOT_COMMENT, batch_script
from pollux.core.errors import BackendFailed

__all__ = ["PilotRequests"]

_log = logging.getLogger("pollux.backends")

_AFTER_FAILURE_SECONDS = 30.0
_BAD_NODE_SECONDS = 3600.0


class PilotRequests:
    """Asks Slurm for pilots, which then wait in `queue`."""

    def __init__(self, queue: QueueView) -> None:
        self._queue = queue
        # When each node was last found to be unusable.
        self._bad_nodes: dict[str, float] = {}
        # The most pilots to ask for at once; None: as many as are wanted.
        self._most_at_once: int | None = None

    def avoid(self, nodes: Iterable[str]) -> None:
        """Ask for no pilots on these nodes for an hour."""
        self._bad_nodes.update(dict.fromkeys(nodes, self._queue.clock()))

    def submit(self, count: int, head: str) -> None:
        """Ask for this number of pilots, or for fewer after a refusal; nodes reach the service at `head`."""
        queue = self._queue
        script = batch_script(queue.options, queue.folder.path, head)
        count = min(count, self._most_at_once or count)
        exclude = [name for name, at in self._bad_nodes.items() if queue.clock() - at < _BAD_NODE_SECONDS]
        try:
            array = queue.commands.submit(script, count, exclude)
        except BackendFailed as error:
            # Slurm may have accepted the request all the same: the queue shows that before the next try.
            queue.pause.wait(_AFTER_FAILURE_SECONDS)
            # Slurm refuses an array as a whole, even if a quota has room for a part of it.
            self._most_at_once = max(1, count // 2)
            queue.warnings.set(
                "submit", f"{count} node{'s' * (count != 1)} cannot be asked for: {error}; Slurm is asked for "
                f"{self._most_at_once} in {_AFTER_FAILURE_SECONDS:.0f} s",
            )  # fmt: skip
            return
        self._most_at_once = 2 * count if self._most_at_once == count else None
        queue.warnings.set("submit")
        for number in range(count):
            row = PilotRow(f"{array}_{number}", "PENDING", None, None, (), PILOT_COMMENT, "just submitted")
            queue.rows[row.id] = row
        _log.info("asked Slurm for %d node(s): array %s", count, array)
