"""How a replica goes from one generation of its job to the next without ending, and what it does when others are lost.

Plans and keys are in `membership`, bytes in `state_transfer`; what a job has to do for it is in `elastic_job`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import torch.distributed as dist

from pollux.agent.checkpoint.training_state import State
from pollux.agent.distributed.process_group import ReplicaGroup, is_loss
from pollux.agent.elastic.heartbeat import HeartbeatSource, thread_clock, thread_is_held_up
from pollux.agent.elastic.membership import OPEN, SHUT, Membership
from pollux.agent.elastic.pause import ResizePause
from pollux.agent.elastic.peer_connections import PeerConnections
from pollux.agent.elastic.resizable import Resizable
from pollux.agent.elastic.state_transfer import Packed, exchange, pack
from pollux.agent.elastic.step_requests import STOP, StepRequests
from pollux.agent.elastic.stray_collective import StrayCollectiveCheck
from pollux.core.errors import CheckpointMismatch, InvalidInput, PolluxError
from pollux.wire.live import exit_codes, keys
from pollux.wire.live.heartbeat import Activity, Heartbeat
from pollux.wire.live.plan import LOST, GenerationPlan

__all__ = ["ElasticMember", "JobLost", "NotNeeded", "refuse_all"]

_PATIENCE_SECONDS = 30.0
_LEAVE_SECONDS = 5.0
_FIRST_LEFT_SECONDS = 10.0
_REFUSE_SECONDS = 0.2
_log = logging.getLogger("pollux")


class JobLost(SystemExit):
    """Ends a replica that cannot go on by itself: whoever supervises it starts the job anew from its checkpoint.

    The exit code is 75; 143 where it was asked to stop meanwhile.
    """

    def __init__(self, code: int = exit_codes.RESTART) -> None:
        super().__init__(code)


class NotNeeded(SystemExit):
    """Ends a replica that was to join a generation that was given up, before it had any part in the job."""

    def __init__(self) -> None:
        super().__init__(0)


class _Withdrawn(Exception):
    """The generation will not come about, and all that were to go there stay where they are."""


def _nothing(phase: str, rank: int) -> None:
    """What happens at each phase besides: nothing."""


at_phase: Callable[[str, int], None] = _nothing
"""Called at each phase of a change with this replica's rank there; tests put failures here."""


class ElasticMember:
    """This replica's way through the generations of its job; `beat` are its signs of life.

    `refusal` says why the job cannot move while it runs, empty where it can. `last_pause` is the length in seconds of
    the last change and its kind; None before one. `joins` says that it has no part in the job yet.
    """

    def __init__(self, membership: Membership, replicas: ReplicaGroup, joins: bool) -> None:
        self.membership = membership
        held_up = thread_is_held_up()
        self.beat = HeartbeatSource(worked=thread_clock(), held_up=lambda: replicas.num_replicas > 1 and held_up())
        self.refusal = ""
        self.last_pause: tuple[float, str] | None = None
        self._replicas = replicas
        self.joins = joins
        self._has_state = not joins
        self._pause: ResizePause | None = None
        self._stepped_at = time.perf_counter()
        self._refused: set[int] = set()
        self._stop_wanted: Callable[[], bool] = lambda: False
        self._sendable: Callable[[], State] = State
        self._connections = PeerConnections(membership, replicas)
        self.astray = StrayCollectiveCheck(lambda why: membership.fail(membership.generation, why))

    def attend(self, job: Resizable, watch: StepRequests) -> None:
        """The job that moves, and where requests to stop are looked at while this replica waits for others."""
        self._sendable = job.sendable
        self._stop_wanted = lambda: watch.wants(STOP)
        if not self.joins:
            with contextlib.suppress(dist.DistError, RuntimeError):
                self._connections.publish(self.membership.generation)

    def free_from_lost(self) -> None:
        """Stop the training thread from waiting for replicas that are known to be lost; from any thread."""
        self._connections.free_from_lost()

    def tell_beat(self) -> None:
        """Tell that this replica lives, where that is so and due."""
        self.astray.look()
        beat = self.beat.due()
        if beat is not None:
            self._tell(beat)

    def _tell(self, beat: Heartbeat) -> None:
        membership = self.membership
        membership.tell(keys.beat(membership.generation, membership.rank), replace(beat, refusal=self.refusal))

    # At step boundaries

    def stepped(self, step: int) -> bool:
        """A step is done; whether it was the first one after a change, which ends the pause."""
        self.beat.step = step
        self.beat.busy = Activity.TRAINING
        self._stepped_at = time.perf_counter()
        if self._pause is None:
            return False
        self._end_pause(step)
        return True

    def end_pause(self) -> None:
        """No step comes next, and others may wait for it: a pause ends here, if one is open."""
        if self._pause is not None:
            self._end_pause(self.beat.step)

    def _end_pause(self, step: int) -> None:
        pause, self._pause = self._pause, None
        assert pause is not None
        pause.end_part("first_step")
        at_phase("first step", self._replicas.replica)
        self.last_pause = pause.seconds, pause.kind
        with contextlib.suppress(dist.DistError, RuntimeError):
            self.membership.tell(keys.done(pause.plan.generation, self._replicas.replica), pause.report(step))

    def rest(self, what: Activity) -> None:
        """No step comes next but code of the user's own: that is no part of a pause, which ends here if one is open."""
        self.end_pause()
        self.beat.busy = what

    def finish(self) -> None:
        """The job is through; whatever the script still does, no change is waited for any more."""
        self.rest(Activity.FINISHED)
        with contextlib.suppress(dist.DistError, RuntimeError):
            self._tell(self.beat.last())

    def wanted(self) -> int | None:
        """The generation to go to now, as this replica sees it; None where it is in the newest that concerns it."""
        plan = self.membership.newest()
        if plan is None or plan.generation in self._refused or self.membership.has_failed(plan.generation) is not None:
            return None
        return plan.generation

    def agrees(self, generation: int) -> bool:
        """Whether the job can go there as it is; asked of replica 0 before anybody pauses. If not, all are told."""
        why = self.refusal
        try:
            if not why:
                pack(self._sendable())
        except InvalidInput as error:
            why = str(error)
        if why:
            if not self._refused:
                _log.warning("no change of replicas while the job runs: %s", why)
            self._refused.add(generation)
            self.membership.fail(generation, why)
        return not why

    def resize(self, job: Resizable, generation: int) -> None:
        """Go to that generation from a boundary that all replicas are at; returns in it, or ends this process."""
        plan = None
        with contextlib.suppress(dist.DistError, RuntimeError):
            plan = self.membership.plan(generation)
        if plan is None:
            # Without the store nobody goes anywhere; those that do wait for this replica in vain, and say so.
            return
        began = self._stepped_at
        self.beat.busy = Activity.REGROUP
        problem = ""
        # All that are at this boundary take part, also where it was withdrawn meanwhile: not all may know of that.
        try:
            at_phase("boundary", self.membership.rank)
            same_size, first_leaves = plan.num_replicas == self._replicas.num_replicas, plan.rank_of(0) is None
            job.part_in_peace(same_size, first_leaves)
        except (dist.DistError, RuntimeError) as error:
            if not is_loss(error):
                raise
            problem = str(error)
        if problem:
            # One of us died on the way out. The plan may stand all the same, if it was one that leaves.
            self._break_off(job)
        self._go(job, plan, began, is_whole=not problem)

    def recover(self, job: Resizable, problem: str) -> None:
        """Go on without replicas that were lost, from memory; ends this process where nobody says with whom."""
        _log.warning("other replicas are gone (%s): waiting to go on without them", problem.splitlines()[0][:200])
        began = self._stepped_at
        self._pause = None
        self.beat.busy = Activity.REGROUP
        at_phase("lost", self.membership.rank)
        self._break_off(job)
        self._go(job, self._await_plan(job, self.membership.generation, problem), began)

    def _break_off(self, job: Resizable) -> None:
        """Leave the groups that some are lost in, and the step under way, for the state before it."""
        self._connections.forget()
        if not self._replicas.break_off():
            _log.warning("a step on the GPU waited for the lost replicas: what it left is not gone on from")
            self._has_state = False
        # At once: whoever waits for this replica in the broken step is freed by it.
        job.disconnect()
        job.drop_unfinished()

    def join(self, job: Resizable) -> None:
        """Say that this replica is built, wait until its generation is to come about, and receive its state."""
        membership = self.membership
        rank, generation = membership.rank, membership.generation
        at_phase("prepare", rank)
        membership.tell(keys.ready(generation, rank))
        at_phase("ready", rank)
        plan = None
        while plan is None:
            if membership.withdrawn(generation) is not None or self._stop_wanted():
                raise NotNeeded
            committed = membership.committed()
            if committed >= generation:
                plan = membership.plan(generation) if committed == generation else membership.newest()
                if plan is None:
                    raise NotNeeded
            else:
                time.sleep(0.005)
        self.beat.busy = Activity.REGROUP
        self._go(job, plan, time.perf_counter())
        # Where nobody stays, all that come run the script from its beginning, together.
        if not plan.senders:
            self.astray.begin()

    # Between generations

    def _go(self, job: Resizable, plan: GenerationPlan, began: float, is_whole: bool = False) -> None:
        """Go there, or wherever the next plan says. `is_whole`: nobody has let go of the old groups yet."""
        num_before = self._replicas.num_replicas
        while True:
            rank = self._rank_in(plan)
            try:
                if rank is None:
                    if plan.senders:
                        self._hand_over(job, plan, began, num_before)
                    self._leave(job, plan, is_whole)
                    raise NotNeeded
                self.membership.enters(plan, rank)
                pause = ResizePause(plan, "grow" if self.joins else plan.kind(num_before), began, last=began)
                self._attempt(job, plan, rank, pause, num_before)
                break
            except _Withdrawn as error:
                problem = str(error)
                if self.joins:
                    raise NotNeeded from None
                if is_whole:
                    _log.info("no change of replicas: %s", problem)
                    self.beat.busy = Activity.TRAINING
                    return
            except CheckpointMismatch as error:
                # What was sent does not fit what is here, and would not a second time.
                self.membership.fail(plan.generation, f"the state does not fit a replica: {error}")
                raise JobLost from error
            except (dist.DistError, RuntimeError, PolluxError) as error:
                problem = f"{type(error).__name__}: {error}"
            _log.warning("generation %d did not come about: %s", plan.generation, problem.splitlines()[0][:300])
            is_whole = False
            self._connections.forget()
            # Whether a step was under way does not matter: none is, and who sends only reads.
            self._replicas.break_off()
            job.disconnect()
            plan = self._await_plan(job, plan.generation, problem)
        self._pause = pause
        self.joins = False
        self.beat.busy = Activity.FIRST_STEP

    def _rank_in(self, plan: GenerationPlan) -> int | None:
        """This replica's rank there; None where it leaves."""
        membership = self.membership
        if self.joins and plan.generation == membership.generation:
            return membership.rank
        return plan.rank_of(membership.ranks[plan.before])

    def _attempt(self, job: Resizable, plan: GenerationPlan, rank: int, pause: ResizePause, num_before: int) -> None:
        receives, state = self._get_state(job, plan, rank, pause, num_before)
        if self.joins:
            pause.kind = plan.kind(int(state.values["num_replicas"]))
        at_phase("wrap", rank)
        pause.end_part("transfer")
        if plan.senders:
            self._connect(job, plan, rank, plan.num_replicas)
            pause.end_part("regroup")
        job.settle(state, receives)
        self._has_state = True
        # Once more: some of the job's parts have groups of their own, which are there now.
        self._connections.publish(plan.generation)
        self.membership.generation = plan.generation
        pause.end_part("wrap")

    def _get_state(
        self, job: Resizable, plan: GenerationPlan, number: int, pause: ResizePause, num_before: int
    ) -> tuple[bool, State]:
        """Meet all that come to the door, as that number of them, and have those get the state that lack it."""
        self._meet(plan, number)
        at_phase("regroup", number)
        self._connect(job, plan, number, plan.num_present)
        pause.end_part("regroup")
        at_phase("transfer", number)
        receives, state = self._transfer(job, pause, num_before)
        if plan.senders:
            # Nobody may let go of that group while another is in it.
            self.membership.tell(keys.received(plan.generation, number))
            self._await(plan, lambda: self.membership.have_received(plan), plan.deadlines.transfer)
        return receives, state

    def _connect(self, job: Resizable, plan: GenerationPlan, number: int, size: int) -> None:
        """Leave what there is for a group of that many: the members, or those and who hands the state over to them."""
        membership, generation = self.membership, plan.generation
        self._connections.forget()
        job.disconnect()
        with_senders = size > plan.num_replicas
        store = membership.handover_store(generation) if with_senders else membership.group_store(generation)
        self._replicas.connect(number, size, plan.num_nodes, store, plan.deadlines.regroup)
        self._connections.publish(generation)

    def _hand_over(self, job: Resizable, plan: GenerationPlan, began: float, num_before: int) -> None:
        """Send the state to those that come in the place of all; returns once nobody needs this replica any more."""
        number = plan.place_of_sender(self.membership.ranks[plan.before])
        if number is None:
            return
        self._get_state(job, plan, number, ResizePause(plan, "", began, last=began), num_before)
        self._connections.forget()
        job.disconnect()
        at_phase("handed over", number)
        self._await(plan, lambda: self.membership.is_handed_over(plan.generation), plan.deadlines.join)

    def _await(self, plan: GenerationPlan, look: Callable[[], bool], seconds: float) -> None:
        """Wait until that is so. `PolluxError` where it will not be: asked to stop, given up, or too late."""
        membership, generation = self.membership, plan.generation

        def seen() -> str | None:
            if look():
                return OPEN
            if self._stop_wanted():
                # That may have been said just before, and the request overtaken it.
                return OPEN if look() else "asked to stop"
            why = membership.has_failed(generation)
            return None if why is None else f"it was given up: {why}"

        found = membership.wait(seen, seconds) or "not all replicas have received the state"
        if found != OPEN:
            raise PolluxError(f"generation {generation}: {found}")

    def _meet(self, plan: GenerationPlan, rank: int) -> None:
        """Wait at the door until all members are there, so that nobody enters a group that never forms."""
        membership, generation = self.membership, plan.generation
        at_phase("door", rank)
        membership.tell(keys.here(generation, rank))

        def look() -> str | None:
            fate = self._fate(plan)
            if fate is not None:
                return fate
            if membership.newest(above=generation) is not None:
                return "there is a newer generation"
            if self._stop_wanted():
                return "asked to stop"
            why = membership.has_failed(generation)
            return None if why is None else f"it was given up: {why}"

        seen = membership.wait(look, plan.deadlines.join) or "not all replicas came"
        if seen == SHUT:
            raise _Withdrawn(f"generation {generation} was withdrawn: {membership.withdrawn(generation)}")
        if seen != OPEN:
            raise PolluxError(f"generation {generation}: {seen}")

    def _fate(self, plan: GenerationPlan) -> str | None:
        """OPEN where all members are at the door, SHUT where the plan was withdrawn before; the same on all replicas.

        None while it is neither.
        """
        membership, generation = self.membership, plan.generation
        if membership.are_here(plan):
            return membership.decide(generation, OPEN)
        return membership.decide(generation, SHUT) if membership.withdrawn(generation) is not None else None

    def _transfer(self, job: Resizable, pause: ResizePause, num_before: int) -> tuple[bool, State]:
        """Whoever is furthest sends to whoever is not; returns whether this replica received, and what."""
        replicas = self._replicas
        mine = [*job.position()] if self._has_state else [-1] * len(job.position())
        table = [tuple(row) for row in replicas.gather([float(number) for number in mine])]
        furthest = max(table)
        if furthest[0] < 0.0:
            self.membership.fail(pause.plan.generation, "no replica that holds the state is left")
            raise JobLost
        senders = [number for number, row in enumerate(table) if row == furthest]
        # Who leaves needs nothing, and what it holds, a step less maybe, is a whole that it can save.
        num_going_on = pause.plan.num_replicas if pause.plan.senders else len(table)
        receivers = [number for number, row in enumerate(table[:num_going_on]) if row != furthest]
        receives = replicas.replica in receivers
        packed: Packed | None = None
        if replicas.replica in senders:
            # First: those that join count what is left of the pause from when they meet the others.
            paused = time.perf_counter() - pause.began
            own = job.local_state(whole=bool(receivers))
            own.values["num_replicas"] = num_before
            own.values["paused_seconds"] = paused
            if replicas.num_replicas == 1:
                return False, own
            packed = pack(own)
        self._has_state = not receives
        met = time.perf_counter()
        state, pause.num_bytes = exchange(
            packed, senders, receivers, replicas.control, job.templates() if receives else None
        )
        if self.joins and "paused_seconds" in state.values:
            # It waited for the others' boundary, which is no part of their pause; older releases do not tell theirs.
            pause.count_from(met, float(state.values["paused_seconds"]))
        return receives, state

    def _await_plan(self, job: Resizable, above: int, problem: str) -> GenerationPlan:
        """The next plan for this replica. None in time: the job is started anew; asked to stop: it is saved first."""
        membership = self.membership

        def look() -> GenerationPlan | str | None:
            if self._stop_wanted():
                return STOP
            return membership.newest(above) or ("given up" if membership.has_failed(above) is not None else None)

        try:
            seen = membership.wait(look, _PATIENCE_SECONDS)
        except (dist.DistError, RuntimeError) as error:
            seen, problem = None, f"{problem}; and the job's store is gone: {error}"
        if isinstance(seen, GenerationPlan):
            return seen
        if self._has_state and self._is_first_left():
            job.save_alone()
        if seen is None:
            membership.fail(above, problem)
        raise JobLost(exit_codes.STOPPED if seen == STOP else exit_codes.RESTART)

    def _is_first_left(self) -> bool:
        """Whether this replica is the one to save; only the very first can know without the job's store."""
        with contextlib.suppress(dist.DistError, RuntimeError):
            return self.membership.is_first_left(_FIRST_LEFT_SECONDS)
        return self.membership.rank == 0

    def _leave(self, job: Resizable, plan: GenerationPlan, is_whole: bool) -> None:
        """Hand over and end, with exit code 0; nothing of the script runs afterwards."""
        membership = self.membership
        at_phase("leave", membership.rank)
        if plan.why != LOST and not plan.senders:
            # Others may still be in a collective of the old groups.
            fate = None
            with contextlib.suppress(dist.DistError, RuntimeError):
                fate = membership.wait(lambda: self._fate(plan), _LEAVE_SECONDS)
            if fate == SHUT and is_whole:
                raise _Withdrawn(f"generation {plan.generation} was withdrawn: it stays")
        job.prepare_to_leave()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def refuse_all(membership: Membership, why: str) -> threading.Thread:
    """Answer every generation to come with `why`, for jobs that only move by a restart; from a thread of its own."""
    beat = Heartbeat(-1, time.time(), Activity.TRAINING, refusal=why)

    def work() -> None:
        answered = membership.generation
        with contextlib.suppress(dist.DistError, RuntimeError):
            membership.tell(keys.beat(membership.generation, membership.rank), beat)
            while True:
                committed = membership.committed()
                if committed > answered:
                    answered = committed
                    membership.fail(committed, why)
                time.sleep(_REFUSE_SECONDS)

    thread = threading.Thread(target=work, name="pollux-refuse", daemon=True)
    thread.start()
    return thread
