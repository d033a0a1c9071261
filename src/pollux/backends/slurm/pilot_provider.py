"""Slurm as a lender of nodes: one thread that looks at the queue and keeps as many pilots as are wanted.

What follows from what it sees is decided in `pool_plan`; commands are in `commands`, files in `pool_folder`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path

from pollux.backends.nodes.provider import LentNode, PooledNodeProvider
from pollux.backends.slurm.commands import SlurmCommands
from pollux.backends.slurm.node_main import CLOSED
from pollux.backends.slurm.parse import NodeRow, PilotRow, read_grace, read_nodes, read_pilots, unknown_states
from pollux.backends.slurm.pool_folder import PoolFolder
from pollux.backends.slurm.pool_plan import ANNOUNCE_SECONDS, GIVE_UP_SECONDS, PoolView, look, plan
from pollux.backends.slurm.script import PILOT_COMMENT, SlurmOptions, batch_script, pool_name
from pollux.core.errors import BackendFailed, PolluxError

__all__ = ["SlurmPilotProvider"]

_log = logging.getLogger("pollux.backends")

_GLANCE_SECONDS = 0.2
_ALERT_SECONDS = 5.0
_BEAT_SECONDS = 5.0
_QUICK_SECONDS = 60.0
_FIRST_PAUSE_SECONDS = 5.0
_LONGEST_PAUSE_SECONDS = 300.0
_AFTER_FAILURE_SECONDS = 30.0
_BAD_NODE_SECONDS = 3600.0
_GRACE_SECONDS = 600.0
_LONGEST_PATIENCE_SECONDS = 7200.0


class SlurmPilotProvider(PooledNodeProvider):
    """Pilots in the folder `path`, which nodes must share; several objects, one after another, may work there.

    `grace_seconds`: what Slurm gives between SIGTERM and SIGKILL, None where that is not known (yet). `calls` and
    `clock` (monotonic seconds) can be replaced for tests. `turn` is one round, done by the thread.
    """

    def __init__(
        self,
        path: Path,
        options: SlurmOptions,
        calls: SlurmCommands | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self.options = options
        self._folder = PoolFolder(path)
        self._calls = calls or SlurmCommands(os.environ, options.command_seconds)
        self._clock = clock
        self._rows: dict[str, PilotRow] = {}
        self._rows_at = 0.0
        self._states: Mapping[str, NodeRow] = {}
        self._kept: object = None
        self._since: dict[str, float] = {}
        self._over: set[str] = set()
        self._cancelled: set[str] = set()
        self._silent: set[str] = set()
        self._bad_nodes: dict[str, float] = {}
        self._trouble: dict[str, str] = {}
        self._picture = PoolView()
        self.grace_seconds: float | None = None
        self._grace_after = 0.0
        self._desired = 0
        self._failures = 0
        self._submit_after = 0.0
        # How many are asked for at once; None: as many as are wanted.
        self._most_at_once: int | None = None
        self._surplus_since: float | None = None
        self._patience_seconds = GIVE_UP_SECONDS
        self._beaten_at = -_BEAT_SECONDS
        self._alert_until = 0.0
        self._sure = False
        self._has_swept = False
        self._halt = threading.Event()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    # What is asked of it

    def start(self, secret: bytes, head: str, changed: Callable[[], None]) -> None:
        """Offer what ran when the service ended, and begin to look."""
        super().start(secret, head, changed)
        self._folder.prepare(secret)
        rows, self._states = self._folder.remembered()
        self._rows = {row.id: row for row in rows}
        self._rows_at = self._clock()
        self._glance()
        self._thread = threading.Thread(target=self._run, name="pollux-slurm", daemon=True)
        self._thread.start()

    def leaving(self) -> Mapping[str, str]:
        """Nodes that still work and are to be left now, with why."""
        return self._picture.leaving

    def is_up(self, node: str) -> bool:
        """Whether the host of a node that is offered is there: always, where only such are offered."""
        return True

    def desire(self, num_nodes: int, awaited: bool = False) -> None:
        """So many would be used; kept between the fewest and the most that were allowed."""
        if num_nodes != self._desired:
            self._desired = num_nodes
            self._wake.set()

    def look_at(self, node: str) -> None:
        """What it writes of its end is looked for at once."""
        self._alert_until = self._clock() + _ALERT_SECONDS
        self._wake.set()

    def give_up(self, silent: Collection[LentNode]) -> None:
        """Their pilots go: Slurm may take minutes to see that a node is dead, and lends no other meanwhile."""
        picture = self._picture
        here = {(hosted.node.id, hosted.address) for hosted in picture.hosts}
        pilots = {picture.of[each.node.id] for each in silent if (each.node.id, each.address) in here}
        if pilots != self._silent:
            self._silent = pilots
            self._wake.set()

    def drop(self, job_id: str, places: Mapping[str, tuple[int, ...]]) -> None:
        """Free them; a node that is being left can go as soon as it is empty."""
        super().drop(job_id, places)
        self._wake.set()

    def warnings(self) -> tuple[str, ...]:
        """What Slurm, its commands or nodes keep from us."""
        return (*[self._trouble[key] for key in sorted(self._trouble)], *self._picture.warnings)

    def close(self) -> None:
        """Let go. Pilots go on: those without work end by themselves in a minute, unless a new object comes."""
        self._halt.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(self.options.command_seconds + 5.0)
            self._thread = None

    # The thread

    def _run(self) -> None:
        due = self._clock()
        while not self._halt.is_set():
            full = self._clock() >= due
            try:
                self.turn(full)
                self._say("turn", "")
            except Exception as error:  # the edge of the loop: whatever went wrong, the next turn may work
                if not isinstance(error, PolluxError):
                    _log.exception("a look at Slurm's queue failed")
                self._say("turn", str(error) or repr(error))
            if full:
                due = self._clock() + self.options.poll_seconds
            self._wake.wait(min(_GLANCE_SECONDS if self._expects else due - self._clock(), self.options.poll_seconds))
            self._wake.clear()
        self._leave()

    @property
    def _expects(self) -> bool:
        """Whether a node may announce itself, or its end, any moment."""
        now = self._clock()
        if now < self._alert_until:
            return True
        here = set(self._picture.of.values())
        fresh = {pilot for pilot, since in self._since.items() if now - since < ANNOUNCE_SECONDS}
        return any(row.is_held and row.id in fresh - here for row in self._rows.values())

    def turn(self, full: bool = True) -> None:
        """One round; `full`: with a look at Slurm's books, else only at what nodes wrote."""
        if self._clock() - self._beaten_at >= _BEAT_SECONDS:
            self._beaten_at = self._clock()
            if self._written(self._folder.beat):
                self._say("folder", "")
        if full:
            self._read_queue()
            self._read_states()
            self._say("states", _unknown(unknown_states(self._rows.values(), self._states.values())))
            self._remember()
            self._read_grace()
        self._glance()
        self._act()

    def _leave(self) -> None:
        """Nobody is going to use what still waits in the queue, unless jobs run on without us."""
        try:
            if not self._in_use():
                self._folder.beat(CLOSED)
                unneeded = self._unneeded()
                if unneeded:
                    self._calls.cancel(unneeded)
        except (OSError, PolluxError) as error:
            _log.warning("what is not needed of Slurm any more could not be cancelled: %s", error)

    def _unneeded(self) -> list[str]:
        """What is given up at the end, when no job runs on: the others are found by whoever comes soon."""
        return [row.id for row in self._rows.values() if row.is_waiting]

    # Looking

    def _read_queue(self) -> None:
        # Before the queue is: whoever wrote here runs, and is in it, or has ended.
        strangers = {} if self._has_swept else self._folder.known()
        try:
            text = self._calls.jobs(pool_name(self._folder.path))
        except BackendFailed as error:
            self._sure = False
            self._say("queue", f"{error}; going on with the nodes there are")
            return
        rows, odd = read_pilots(text)
        self._say("queue", _odd("squeue", odd))
        # Where a line was not understood, a pilot that is not in the others may be that one.
        known = self._rows if odd else {}
        self._rows_at, self._sure = self._clock(), not odd
        before = self._rows
        self._rows = {**known, **{row.id: row for row in rows if not row.has_ended}}
        for row in rows:
            if row.has_nodes:
                self._since.setdefault(row.id, self._clock())
        for row in rows:
            # Given back one by one: what we asked for and heard no answer to may have been done.
            gone = set(before[row.id].nodes).difference(row.nodes) if row.id in before and row.nodes else set()
            if gone:
                self._folder.forget_nodes(row.id, gone)
        self._take_ends([row for row in rows if row.has_ended], before)
        if self._sure and not self._has_swept:
            # They ended while nobody looked. Their nodes' names are free again for the next ones.
            self._has_swept = True
            self._folder.sweep({pilot: nodes for pilot, nodes in strangers.items() if pilot not in self._rows})

    def _remember(self) -> None:
        """Keep what the next object begins with: types of GPUs too, since a node must not change its own meanwhile."""
        running = {row.id: row.nodes for row in self._rows.values() if row.has_nodes}
        gres = {name: self._states[name].gres for names in running.values() for name in names if name in self._states}
        kept = (running, gres)
        if kept != self._kept and self._written(lambda: self._folder.remember(self._rows.values(), self._states)):
            self._kept = kept

    def _written(self, write: Callable[[], None]) -> bool:
        """Whether it could be: a folder that is full for a while is no reason not to look at what runs."""
        try:
            write()
        except OSError as error:
            self._say("folder", f"cannot write {self._folder.path}: {error.strerror}; free some space or check its "
                      f"rights: nodes without work go after {self.options.orphan_seconds:g} s without a sign of the "
                      "service there")  # fmt: skip
            return False
        return True

    def _take_ends(self, ended: list[PilotRow], before: Mapping[str, PilotRow]) -> None:
        told = {row.id for row in ended}
        gone = [replace(before[pilot], state="gone", reason="") for pilot in before.keys() - self._rows.keys() - told]
        over = [row for row in (*ended, *gone) if row.id not in self._over]
        for row in over:
            self._ended(row, before.get(row.id))
        self._over = {*told, *(row.id for row in gone)}
        self._cancelled &= {*self._rows, *self._over}
        if over:
            self._folder.sweep({row.id: row.nodes or before.get(row.id, row).nodes for row in over})

    def _read_states(self) -> None:
        names = {name for row in self._rows.values() if row.has_nodes for name in row.nodes}
        if not names:
            self._states = {}
            return
        try:
            states, odd = read_nodes(self._calls.nodes(sorted(names)))
        except BackendFailed as error:
            self._say("nodes", f"{error}; nodes are taken for as they were")
            return
        self._say("nodes", _odd("sinfo", odd))
        self._states = {**self._states, **states} if odd else states

    def _read_grace(self) -> None:
        """Now and then: an administrator may change it. Where it cannot be read, nothing is said of it."""
        if self._clock() >= self._grace_after:
            self._grace_after = self._clock() + _GRACE_SECONDS
            with contextlib.suppress(BackendFailed):
                self.grace_seconds = read_grace(*self._calls.limits(), self.options.partition)

    def _glance(self) -> None:
        """Take in what nodes wrote, and show what there is."""
        notes, odd = self._folder.notes()
        self._say("notes", odd[0] if odd else "")
        now = self._clock()
        running = {pilot: now - since for pilot, since in self._since.items()}
        self._publish(look(self.options, self._aged(), self._states, notes, running, self._patience_seconds))

    def _aged(self) -> list[PilotRow]:
        """The rows as they are by now."""
        passed = self._clock() - self._rows_at
        return [_later(row, passed) for row in self._rows.values()]

    def _publish(self, picture: PoolView) -> None:
        before, self._picture = self._picture, picture
        for name in picture.bad_nodes:
            self._bad_nodes[name] = self._clock()
        if set(picture.of) - set(before.of):
            self._failures = 0
            self._say("pilot", "")
        self.offer(picture.hosts)
        if before.leaving.keys() != picture.leaving.keys():
            for name, why in picture.leaving.items():
                if name not in before.leaving:
                    _log.warning("node '%s' is being left: %s", name, why)
            self._changed()

    def _ended(self, row: PilotRow, before: PilotRow | None) -> None:
        """A pilot is over: remember whether it ever was of use, and ask for no other at once if not."""
        since = self._since.pop(row.id, self._clock())
        if before is not None and row.id not in self._cancelled and self._clock() - since < _QUICK_SECONDS:
            pause = self._pause()
            words = self._folder.last_words(row.id)
            why = "; ".join(each for each in (row.reason, words) if each)
            self._say("pilot", f"pilot {row.id} ended early as {row.state}{' (' + why + ')' if why else ''}; the next "
                      f"is asked for in {pause:.0f} s")  # fmt: skip

    def _pause(self) -> float:
        """Nothing is asked of Slurm for a while, the longer the more often it was in vain; the seconds."""
        self._failures += 1
        pause = min(_FIRST_PAUSE_SECONDS * 2.0 ** min(self._failures - 1, 10), _LONGEST_PAUSE_SECONDS)
        self._submit_after = self._clock() + pause
        return pause

    # Acting

    def _in_use(self) -> set[str]:
        with self._books:
            return {node for held in self._held.values() for node, places in held.items() if places}

    def _act(self) -> None:
        now = self._clock()
        wanted = min(max(self._desired, self.options.least_nodes), self.options.most_nodes)
        count = len(self._picture.steady) + len(self._picture.waiting)
        if count <= wanted:
            self._surplus_since = None
        elif self._surplus_since is None:
            self._surplus_since = now
        patient = self._surplus_since is not None and now - self._surplus_since >= self.options.idle_seconds
        may_submit = self._sure and now >= self._submit_after and not self._halt.is_set()
        in_use = self._in_use()
        todo = plan(self.options, self._picture, wanted, in_use, may_submit, patient)
        silent = self._silent & self._rows.keys() - {self._picture.of.get(host, "") for host in in_use}
        cancel = (*todo.cancel, *sorted(silent.difference(todo.cancel)))
        if cancel:
            self._cancel(cancel)
        if todo.submit:
            self._submit(todo.submit)

    def _submit(self, count: int) -> None:
        script = batch_script(self.options, self._folder.path, self.head)
        count = min(count, self._most_at_once or count)
        exclude = [name for name, at in self._bad_nodes.items() if self._clock() - at < _BAD_NODE_SECONDS]
        try:
            array = self._calls.submit(script, count, exclude)
        except BackendFailed as error:
            # It may have been taken all the same: the queue tells, before it is tried again.
            self._submit_after = self._clock() + _AFTER_FAILURE_SECONDS
            # An array is refused as a whole, also where a quota has room for a part of it.
            self._most_at_once = max(1, count // 2)
            many = f"{count} node{'s' * (count != 1)}"
            self._say("submit", f"{many} cannot be asked for: {error}; Slurm is asked for "
                      f"{self._most_at_once} in {_AFTER_FAILURE_SECONDS:.0f} s")  # fmt: skip
            return
        self._most_at_once = 2 * count if self._most_at_once == count else None
        self._say("submit", "")
        for number in range(count):
            row = PilotRow(f"{array}_{number}", "PENDING", None, None, (), PILOT_COMMENT, "just submitted")
            self._rows[row.id] = row
        _log.info("asked Slurm for %d node(s): array %s", count, array)

    def _cancel(self, pilots: tuple[str, ...]) -> None:
        new = [pilot for pilot in pilots if pilot not in self._cancelled]
        if not new:
            return
        try:
            self._calls.cancel(new)
        except BackendFailed as error:
            self._say("cancel", f"nodes cannot be given back: {error}")
            return
        self._say("cancel", "")
        self._cancelled.update(new)
        if set(new) & set(self._picture.given_up):
            # What takes so long to prepare would never come where each is given back as soon as the last.
            self._patience_seconds = min(2.0 * self._patience_seconds, _LONGEST_PATIENCE_SECONDS)
        _log.info("gave nodes back to Slurm: %s", ", ".join(new))

    def _say(self, key: str, text: str) -> None:
        """A warning of that kind, until it is said that there is none."""
        if text and self._trouble.get(key) != text:
            _log.warning("%s", text)
        if text:
            self._trouble[key] = text
        else:
            self._trouble.pop(key, None)


def _later(row: PilotRow, seconds: float) -> PilotRow:
    """The row as it is so many seconds after it was read."""
    return row if row.seconds_left is None else replace(row, seconds_left=row.seconds_left - seconds)


def _unknown(states: list[str]) -> str:
    if not states:
        return ""
    return (
        f"Slurm prints {', '.join(repr(state) for state in states)}, which this version does not know: what is in "
        "such a state is left with the work saved; is there a newer version of pollux-scheduler?"
    )


def _odd(command: str, lines: list[str]) -> str:
    if not lines:
        return ""
    return (
        f"{command} printed {len(lines)} line{'s' * (len(lines) != 1)} that cannot be understood, such as "
        f"'{lines[0][:120]}': what was known stays; is its output changed by a wrapper?"
    )
