"""Reads Slurm's queue, its nodes and the pool's folder in rounds; also has the thread for these rounds.

The two providers, `pilot_provider` and `job_provider`, decide what to do with nodes and jobs.
A lost node is noticed here on Slurm: its batch job has left the queue (`_read_queue`), or Slurm calls the node down
(`_read_states`). `pool_plan` (`_ViewBuilder._node`) then drops it, and `fleet/node_watch` tells the jobs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from pollux.backends.slurm.commands import SlurmCommands
from pollux.backends.slurm.node_main import CLOSED
from pollux.backends.slurm.parse import NodeRow, PilotRow, read_grace, read_nodes, read_pilots, unknown_states
from pollux.backends.slurm.pool_folder import PoolFolder
from pollux.backends.slurm.pool_plan import ANNOUNCE_SECONDS, GIVE_UP_SECONDS, PoolView, view_pool
from pollux.backends.slurm.script import SlurmOptions, pool_name
from pollux.core.errors import BackendFailed, PolluxError

__all__ = ["QueueView", "Rounds", "StandingWarnings", "SubmitPause"]

_log = logging.getLogger("pollux.backends")

_GLANCE_SECONDS = 0.2
_ALERT_SECONDS = 5.0
_BEAT_SECONDS = 5.0
_EARLY_END_SECONDS = 60.0
_FIRST_PAUSE_SECONDS = 5.0
_LONGEST_PAUSE_SECONDS = 300.0
_GRACE_SECONDS = 600.0
_LONGEST_PATIENCE_SECONDS = 7200.0


class StandingWarnings:
    """At most one warning of each kind, valid until it is set to empty; a new text is logged."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def set(self, kind: str, text: str = "") -> None:
        """Replace the warning of that kind; empty removes it."""
        if text and self._texts.get(kind) != text:
            _log.warning("%s", text)
        if text:
            self._texts[kind] = text
        else:
            self._texts.pop(kind, None)

    def kinds(self) -> list[str]:
        """The kinds of the present warnings."""
        return [*self._texts]

    def texts(self) -> tuple[str, ...]:
        """The present warnings, in the order of their kinds."""
        return tuple(text for _, text in sorted(self._texts.items()))


class SubmitPause:
    """The pause between requests to Slurm; it grows after each request that fails."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failures = 0
        self._until = 0.0

    @property
    def is_over(self) -> bool:
        """Whether the next request may be sent."""
        return self._clock() >= self._until

    def lengthen(self) -> float:
        """Note one more failed request; the seconds until the next."""
        self._failures += 1
        seconds = min(_FIRST_PAUSE_SECONDS * 2.0 ** min(self._failures - 1, 10), _LONGEST_PAUSE_SECONDS)
        self.wait(seconds)
        return seconds

    def wait(self, seconds: float) -> None:
        """Send no request for this time."""
        self._until = self._clock() + seconds

    def shorten(self) -> None:
        """Make the next pause as short as the first, after a request that succeeded."""
        self._failures = 0


class QueueView:
    """Our jobs in Slurm's queue, their nodes, and the `pool` that follows from both and from the files of nodes.

    `rows`: jobs by id. `states`: nodes by name. `is_sure`: Slurm answered the last query, and every line was
    understood. `since`: when each job was first seen running. `cancelled`: jobs that were given back. `grace_seconds`:
    the time between Slurm's SIGTERM and SIGKILL, None where that is not known (yet). `clock` returns monotonic seconds.
    """

    def __init__(
        self, path: Path, options: SlurmOptions, commands: SlurmCommands | None, clock: Callable[[], float]
    ) -> None:
        self.options = options
        self.folder = PoolFolder(path)
        self.commands = commands or SlurmCommands(os.environ, options.command_seconds)
        self.clock = clock
        self.warnings = StandingWarnings()
        self.pause = SubmitPause(clock)
        self.rows: dict[str, PilotRow] = {}
        self.states: Mapping[str, NodeRow] = {}
        self.since: dict[str, float] = {}
        self.cancelled: set[str] = set()
        self.pool = PoolView()
        self.is_sure = False
        self.grace_seconds: float | None = None
        self._rows_at = 0.0
        self._over: set[str] = set()
        self._remembered: object = None
        self._patience_seconds = GIVE_UP_SECONDS
        self._beaten_at = -_BEAT_SECONDS
        self._grace_due = 0.0
        self._has_swept = False

    def restore(self, secret: bytes) -> None:
        """Prepare the folder, and load the pilots and nodes of the last service."""
        self.folder.prepare(secret)
        rows, self.states = self.folder.load_running()
        self.rows = {row.id: row for row in rows}
        self._rows_at = self.clock()

    def all_warnings(self) -> tuple[str, ...]:
        """One sentence for each problem of Slurm, of its commands or of nodes."""
        return (*self.warnings.texts(), *self.pool.warnings)

    def read(self, all_nodes: bool = False) -> None:
        """Ask Slurm for our jobs and for their nodes, or for `all_nodes` of the partition."""
        self._read_queue()
        self._read_states(all_nodes)
        self.warnings.set("states", _unknown(unknown_states(self.rows.values(), self.states.values())))
        self._remember()
        self._read_grace()

    def write_pulse(self) -> None:
        """Show the nodes every few seconds that the service runs."""
        if self.clock() - self._beaten_at >= _BEAT_SECONDS:
            self._beaten_at = self.clock()
            if self._has_written(self.folder.write_pulse):
                self.warnings.set("folder")

    # The queue

    def _read_queue(self) -> None:
        # Read before the queue: a pilot with files here is then in the queue, or has ended.
        strangers = {} if self._has_swept else self.folder.pilots_on_disk()
        try:
            text = self.commands.jobs(pool_name(self.folder.path))
        except BackendFailed as error:
            self.is_sure = False
            self.warnings.set("queue", f"{error}; going on with the nodes there are")
            return
        rows, odd = read_pilots(text)
        self.warnings.set("queue", _odd("squeue", odd))
        self._rows_at, self.is_sure = self.clock(), not odd
        before = self.rows
        # A line that was not understood may be about a pilot that is in no other line.
        known = before if odd else {}
        self.rows = {**known, **{row.id: row for row in rows if not row.has_ended}}
        for row in rows:
            self._compare(row, before.get(row.id))
        self._note_ends([row for row in rows if row.has_ended], before)
        if self.is_sure and not self._has_swept:
            # These pilots ended while no service ran: free the names of their nodes for others.
            self._has_swept = True
            self.folder.remove_ended({pilot: nodes for pilot, nodes in strangers.items() if pilot not in self.rows})

    def _compare(self, row: PilotRow, before: PilotRow | None) -> None:
        """Note when a job began to run, and which of its nodes it has lost."""
        if row.has_nodes:
            self.since.setdefault(row.id, self.clock())
        # Nodes given back one by one: Slurm may have taken them even if its command did not answer.
        gone = set(before.nodes).difference(row.nodes) if before is not None and row.nodes else set()
        if gone:
            self.folder.forget_nodes(row.id, gone)

    def _note_ends(self, ended: list[PilotRow], before: Mapping[str, PilotRow]) -> None:
        """Note the jobs that have ended, and those that Slurm does not print any more."""
        unprinted = before.keys() - self.rows.keys() - {row.id for row in ended}
        ended = [*ended, *(replace(before[pilot], state="gone", reason="") for pilot in unprinted)]
        over = {row.id: row for row in ended if row.id not in self._over}
        for row in over.values():
            ran_seconds = self.clock() - self.since.pop(row.id, self.clock())
            if row.id in before:
                self._note_early_end(row, ran_seconds)
        self._over = {row.id for row in ended}
        self.cancelled &= {*self.rows, *self._over}
        if over:
            self.folder.remove_ended({pilot: row.nodes or before.get(pilot, row).nodes for pilot, row in over.items()})

    def _note_early_end(self, row: PilotRow, ran_seconds: float) -> None:
        """Pause requests after a pilot that ended before it was of use."""
        if row.id in self.cancelled or ran_seconds >= _EARLY_END_SECONDS:
            return
        pause = self.pause.lengthen()
        why = "; ".join(each for each in (row.reason, self.folder.last_log_line(row.id)) if each)
        self.warnings.set("pilot", f"pilot {row.id} ended early as {row.state}{' (' + why + ')' if why else ''}; the "
                          f"next is asked for in {pause:.0f} s")  # fmt: skip

    def _read_states(self, all_nodes: bool) -> None:
        names = {name for row in self.rows.values() if row.has_nodes for name in row.nodes}
        if not all_nodes and not names:
            self.states = {}
            return
        ask = self.commands
        try:
            text = ask.all_nodes(self.options.partition) if all_nodes else ask.nodes(sorted(names))
        except BackendFailed as error:
            self.warnings.set("nodes", f"{error}; nodes keep their last known state")
            return
        states, odd = read_nodes(text, with_use=all_nodes)
        self.warnings.set("nodes", _odd("sinfo", odd))
        self.states = {**self.states, **states} if odd else states

    def _remember(self) -> None:
        """Save what the next object loads; with GPU types, since the type of a node must not change."""
        running = {row.id: row.nodes for row in self.rows.values() if row.has_nodes}
        gres = {name: self.states[name].gres for names in running.values() for name in names if name in self.states}
        kept = (running, gres)
        if kept != self._remembered and self._has_written(
            lambda: self.folder.save_running(self.rows.values(), self.states)
        ):
            self._remembered = kept

    def _read_grace(self) -> None:
        """Read the grace now and then, since an administrator may change it; it keeps its value if that fails."""
        if self.clock() >= self._grace_due:
            self._grace_due = self.clock() + _GRACE_SECONDS
            with contextlib.suppress(BackendFailed):
                self.grace_seconds = read_grace(*self.commands.limits(), self.options.partition)

    def _has_written(self, write: Callable[[], None]) -> bool:
        """Whether `write` succeeded: a full folder must not stop the rounds."""
        try:
            write()
        except OSError as error:
            self.warnings.set(
                "folder", f"cannot write {self.folder.path}: {error.strerror}; free some space or check its rights: "
                f"nodes without work end {self.options.orphan_seconds:g} s after they last saw the service there",
            )  # fmt: skip
            return False
        return True

    # The pool

    def current_rows(self) -> list[PilotRow]:
        """The rows with the time that is left now."""
        passed = self.clock() - self._rows_at
        return [
            row if row.seconds_left is None else replace(row, seconds_left=row.seconds_left - passed)
            for row in self.rows.values()
        ]

    def pool_of(self, rows: Collection[PilotRow]) -> PoolView:
        """The pool that follows from these rows, from the states of nodes, and from the files of nodes."""
        notes, odd = self.folder.notes()
        self.warnings.set("notes", odd[0] if odd else "")
        now = self.clock()
        running = {pilot: now - since for pilot, since in self.since.items()}
        return view_pool(self.options, rows, self.states, notes, running, self._patience_seconds)

    def replace_pool(self, pool: PoolView) -> bool:
        """Make this the current pool; whether the nodes to be left have changed."""
        before, self.pool = self.pool, pool
        if set(pool.pilot_of) - set(before.pilot_of):
            self.pause.shorten()
            self.warnings.set("pilot")
        for name in pool.leaving.keys() - before.leaving.keys():
            _log.warning("node '%s' is being left: %s", name, pool.leaving[name])
        return before.leaving.keys() != pool.leaving.keys()

    @property
    def expects_news(self) -> bool:
        """Whether a node may announce itself soon."""
        now, announced = self.clock(), set(self.pool.pilot_of.values())
        fresh = {pilot for pilot, since in self.since.items() if now - since < ANNOUNCE_SECONDS}
        return any(row.is_held and row.id in fresh - announced for row in self.rows.values())

    # Jobs that are given back

    def cancel(self, pilots: Iterable[str]) -> None:
        """Cancel these pilots, each once."""
        new = [pilot for pilot in pilots if pilot not in self.cancelled]
        if not new:
            return
        try:
            self.commands.cancel(new)
        except BackendFailed as error:
            self.warnings.set("cancel", f"nodes cannot be given back: {error}")
            return
        self.warnings.set("cancel")
        self.cancelled.update(new)
        if set(new) & set(self.pool.given_up):
            # Give the next pilot more time: a node may need longer than the last one had.
            self._patience_seconds = min(2.0 * self._patience_seconds, _LONGEST_PATIENCE_SECONDS)
        _log.info("gave nodes back to Slurm: %s", ", ".join(new))

    def close(self, unneeded: list[str]) -> None:
        """Tell the nodes that the service ends with no job running, and cancel pilots that no job will use."""
        try:
            self.folder.write_pulse(CLOSED)
            if unneeded:
                self.commands.cancel(unneeded)
        except (OSError, PolluxError) as error:
            _log.warning("Slurm jobs that are not needed any more could not be cancelled: %s", error)


class Rounds:
    """The thread of a provider: reads the queue every `poll_seconds`, and the folder when nodes may write there.

    `do_round` does one round, and reads the queue if its argument is True; `give_back` is called once, at the end.
    """

    def __init__(self, queue: QueueView, do_round: Callable[[bool], None], give_back: Callable[[], None]) -> None:
        self._queue, self._do_round, self._give_back = queue, do_round, give_back
        self._alert_until = 0.0
        self._halt = threading.Event()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def are_ending(self) -> bool:
        """Whether `close` was called."""
        return self._halt.is_set()

    @property
    def expect_news(self) -> bool:
        """Whether a node may announce itself, or its end, soon."""
        return self._queue.clock() < self._alert_until or self._queue.expects_news

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="pollux-slurm", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Start the next round now."""
        self._wake.set()

    def watch_folder(self) -> None:
        """Read the folder often for a while: a node may write soon."""
        self._alert_until = self._queue.clock() + _ALERT_SECONDS
        self.wake()

    def close(self) -> None:
        """End the thread, and wait for its end."""
        self._halt.set()
        self.wake()
        if self._thread is not None:
            self._thread.join(self._queue.options.command_seconds + 5.0)
            self._thread = None

    def _run(self) -> None:
        clock, poll_seconds = self._queue.clock, self._queue.options.poll_seconds
        due = clock()
        while not self._halt.is_set():
            full = clock() >= due
            self._try_round(full)
            if full:
                due = clock() + poll_seconds
            self._wake.wait(min(_GLANCE_SECONDS if self.expect_news else due - clock(), poll_seconds))
            self._wake.clear()
        self._give_back()

    def _try_round(self, full: bool) -> None:
        try:
            self._do_round(full)
            self._queue.warnings.set("round")
        except Exception as error:  # the edge of the loop: the next round may work
            if not isinstance(error, PolluxError):
                _log.exception("a look at Slurm's queue failed")
            self._queue.warnings.set("round", str(error) or repr(error))


def _unknown(states: list[str]) -> str:
    if not states:
        return ""
    return (
        f"Slurm prints {', '.join(repr(state) for state in states)}, which this version does not know: jobs save, "
        "and leave nodes in such a state; is there a newer version of pollux-scheduler?"
    )


def _odd(command: str, lines: list[str]) -> str:
    if not lines:
        return ""
    return (
        f"{command} printed {len(lines)} line{'s' * (len(lines) != 1)} that cannot be understood, such as "
        f"'{lines[0][:120]}': the last known state is kept; does a wrapper change its output?"
    )
