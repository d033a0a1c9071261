"""Moves a replica to another generation: it meets the others, sends or receives the state, and rebuilds the job.

`member` decides when; `membership` has plans and keys, `state_transfer` the bytes.
The first step after the move, also that of a new replica, ends the pause in `ElasticMember.stepped`.
In a live resize: after `agent.elastic.member`, before `agent.job.elastic_job` (docs/design/0016).
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

from pollux.agent.checkpoint.state import State
from pollux.agent.distributed.process_group import ReplicaGroup
from pollux.agent.elastic.heartbeat import HeartbeatSource
from pollux.agent.elastic.member_states import CutOff, FirstStep, Gone, Regrouping, StateTrack
from pollux.agent.elastic.membership import OPEN, SHUT, Membership
from pollux.agent.elastic.pause import ResizePause
from pollux.agent.elastic.peer_connections import PeerConnections
from pollux.agent.elastic.resizable import Resizable
from pollux.agent.elastic.state_transfer import Packed, exchange, pack
from pollux.agent.elastic.step_requests import STOP
from pollux.core.errors import CheckpointMismatch, PolluxError
from pollux.wire.live import exit_codes, keys
from pollux.wire.live.heartbeat import Activity
from pollux.wire.live.plan import LOST, GenerationPlan

__all__ = ["GenerationMove", "JobLost", "NotNeeded"]

_PATIENCE_SECONDS = 30.0
_LEAVE_SECONDS = 5.0
_FIRST_LEFT_SECONDS = 10.0
_log = logging.getLogger("pollux")


class JobLost(SystemExit):
    """Ends a replica that cannot continue: the job is then restarted from its checkpoint.

    The exit code is 75; 143 where the replica was asked to stop meanwhile.
    """

    def __init__(self, code: int = exit_codes.RESTART) -> None:
        super().__init__(code)


class NotNeeded(SystemExit):
    """Ends a replica that leaves, and one that was to join a generation that was withdrawn."""

    def __init__(self) -> None:
        super().__init__(0)


class _Withdrawn(Exception):
    """The plan was withdrawn in time: all replicas stay in their generation."""


def _nothing(phase: str, rank: int) -> None:
    """Does nothing; tests replace it."""


at_phase: Callable[[str, int], None] = _nothing
"""Called at each phase of a change with this replica's rank, so that tests can inject failures."""


class GenerationMove:
    """The moves of one replica; `stop_wanted` says whether the replica was asked to stop."""

    def __init__(
        self, membership: Membership, replicas: ReplicaGroup, states: StateTrack, beat: HeartbeatSource
    ) -> None:
        self.connections = PeerConnections(membership, replicas)
        self.stop_wanted: Callable[[], bool] = lambda: False
        self._membership = membership
        self._replicas = replicas
        self._states = states
        self._beat = beat

    def leave_broken_group(self, job: Resizable) -> None:
        """Leave the groups in which replicas were lost, and return to the state before the unfinished step."""
        now = self._states.now
        self._states.enter(CutOff(joins=now.joins, has_state=now.has_state))
        self.connections.forget()
        if not self._replicas.abort_collectives():
            _log.warning("a step on the GPU waited for the lost replicas: the state it left cannot be trusted")
            self._states.now.has_state = False
        # Before all else: this frees the replicas that wait for this one in the broken step.
        job.disconnect()
        job.drop_unfinished_step()

    def move_to(self, job: Resizable, plan: GenerationPlan, began: float) -> None:
        """Move to the generation of a plan, or of a later plan where this one fails; `began`: see `Regrouping`.

        Where the plan is withdrawn in time, the replica stays in its generation.
        """
        num_before = self._replicas.num_replicas
        while True:
            move = Regrouping(plan, self._states.now, began, num_before)
            self._states.enter(move)
            try:
                pause = self._enter(job, move)
                break
            except _Withdrawn as error:
                problem = str(error)
                if move.joins:
                    self._states.enter(Gone())
                    raise NotNeeded from None
                if move.can_stay:
                    _log.info("no change of replicas: %s", problem)
                    self._states.enter(move.before)
                    self._beat.busy = Activity.TRAINING
                    return
            except CheckpointMismatch as error:
                # The state that was sent does not fit this replica, and would not fit the next time.
                self._membership.fail(plan.generation, f"the state does not fit a replica: {error}")
                self._states.enter(Gone())
                raise JobLost from error
            except (dist.DistError, RuntimeError, PolluxError) as error:
                problem = f"{type(error).__name__}: {error}"
            _log.warning("the move to generation %d failed: %s", plan.generation, problem.splitlines()[0][:300])
            self.connections.forget()
            # No step is under way, and sending does not change the state, so it stays valid.
            self._replicas.abort_collectives()
            job.disconnect()
            self._states.enter(CutOff(joins=move.joins, has_state=move.has_state))
            plan = self.await_plan(job, plan.generation, problem)
        self._states.enter(FirstStep(pause))
        self._beat.busy = Activity.FIRST_STEP

    def _enter(self, job: Resizable, move: Regrouping) -> ResizePause:
        """Become a member of the generation, or leave the job if the plan says so; returns the open pause."""
        membership, plan = self._membership, move.plan
        rank = self._rank_in(move)
        if rank is None:
            if plan.senders:
                self._hand_over(job, move)
            self._leave(job, move)
            raise NotNeeded
        membership.note_rank(plan, rank)
        pause = ResizePause(plan, "grow" if move.joins else plan.kind(move.num_before), move.began, last=move.began)
        receives, state = self._get_state(job, move, rank, pause)
        if move.joins:
            pause.kind = plan.kind(int(state.values["num_replicas"]))
        at_phase("wrap", rank)
        pause.end_part("transfer")
        if plan.senders:
            self._connect(job, plan, rank, plan.num_replicas)
            pause.end_part("regroup")
        job.rebuild(state, receives)
        move.has_state = True
        # Published again, since parts of the job have made groups of their own meanwhile.
        self.connections.publish(plan.generation)
        membership.generation = plan.generation
        pause.end_part("wrap")
        return pause

    def _rank_in(self, move: Regrouping) -> int | None:
        """This replica's rank in the generation of the plan; None where it leaves."""
        membership, plan = self._membership, move.plan
        if move.joins and plan.generation == membership.generation:
            return membership.rank
        return plan.rank_of(membership.ranks[plan.before])

    def _get_state(self, job: Resizable, move: Regrouping, number: int, pause: ResizePause) -> tuple[bool, State]:
        """Meet the others as replica `number`, and send the state to those that lack it.

        Returns whether this replica received it, and the state.
        """
        plan = move.plan
        self._wait_at_door(plan, number)
        at_phase("regroup", number)
        self._connect(job, plan, number, plan.num_present)
        pause.end_part("regroup")
        at_phase("transfer", number)
        receives, state = self._transfer(job, move, pause)
        if plan.senders:
            # No replica may leave that group while another one is using it.
            self._membership.write(keys.received(plan.generation, number))
            self._wait_for(plan, lambda: self._membership.have_received(plan), plan.deadlines.transfer)
        return receives, state

    def _connect(self, job: Resizable, plan: GenerationPlan, number: int, size: int) -> None:
        """Leave the old groups for one of `size` members, with or without the leavers that send the state."""
        membership, generation = self._membership, plan.generation
        self.connections.forget()
        job.disconnect()
        with_senders = size > plan.num_replicas
        store = membership.handover_store(generation) if with_senders else membership.group_store(generation)
        self._replicas.connect(number, size, plan.num_nodes, store, plan.deadlines.regroup)
        self.connections.publish(generation)

    def _hand_over(self, job: Resizable, move: Regrouping) -> None:
        """Send the state to the replicas that replace all old ones; returns once they have it."""
        plan = move.plan
        number = plan.place_of_sender(self._membership.ranks[plan.before])
        if number is None:
            return
        self._get_state(job, move, number, ResizePause(plan, "", move.began, last=move.began))
        self.connections.forget()
        job.disconnect()
        at_phase("handed over", number)
        self._wait_for(plan, lambda: self._membership.is_handed_over(plan.generation), plan.deadlines.join)

    def _wait_for(self, plan: GenerationPlan, is_so: Callable[[], bool], seconds: float) -> None:
        """Wait until `is_so`; `PolluxError` after that many seconds, a request to stop, or a failure of some rank."""
        membership, generation = self._membership, plan.generation

        def look() -> str | None:
            if is_so():
                return OPEN
            if self.stop_wanted():
                # The condition may have become true just before the request to stop.
                return OPEN if is_so() else "asked to stop"
            why = membership.has_failed(generation)
            return None if why is None else f"it was given up: {why}"

        found = membership.wait(look, seconds) or "not all replicas have received the state"
        if found != OPEN:
            raise PolluxError(f"generation {generation}: {found}")

    def _wait_at_door(self, plan: GenerationPlan, number: int) -> None:
        """Wait until all replicas of the meeting have come, so that none enters a group that never forms."""
        membership, generation = self._membership, plan.generation
        at_phase("door", number)
        membership.write(keys.here(generation, number))

        def look() -> str | None:
            decided = self._decide_door(plan)
            if decided is not None:
                return decided
            if membership.newest(above=generation) is not None:
                return "there is a newer generation"
            if self.stop_wanted():
                return "asked to stop"
            why = membership.has_failed(generation)
            return None if why is None else f"it was given up: {why}"

        found = membership.wait(look, plan.deadlines.join) or "not all replicas came"
        if found == SHUT:
            raise _Withdrawn(f"generation {generation} was withdrawn: {membership.withdrawn(generation)}")
        if found != OPEN:
            raise PolluxError(f"generation {generation}: {found}")

    def _decide_door(self, plan: GenerationPlan) -> str | None:
        """OPEN where all replicas have come, SHUT where the plan was withdrawn before that; None while undecided.

        The first replica that decides does so for all.
        """
        membership, generation = self._membership, plan.generation
        if membership.are_here(plan):
            return membership.decide(generation, OPEN)
        return membership.decide(generation, SHUT) if membership.withdrawn(generation) is not None else None

    def _transfer(self, job: Resizable, move: Regrouping, pause: ResizePause) -> tuple[bool, State]:
        """Send the state from the replicas that are furthest to those that are behind.

        Returns whether this replica received it, and the state.
        """
        replicas, plan = self._replicas, move.plan
        mine = [*job.position()] if move.has_state else [-1] * len(job.position())
        positions = [tuple(row) for row in replicas.gather([float(number) for number in mine])]
        if max(positions)[0] < 0.0:
            self._membership.fail(plan.generation, "no replica that holds the state is left")
            self._states.enter(Gone())
            raise JobLost
        # A replica that leaves receives nothing: its state, maybe a step behind, is complete and can be saved.
        senders, receivers = _roles(positions, plan.num_replicas if plan.senders else len(positions))
        receives = replicas.replica in receivers
        packed: Packed | None = None
        if replicas.replica in senders:
            own = self._own_state(job, move, whole=bool(receivers))
            if replicas.num_replicas == 1:
                return False, own
            packed = pack(own)
        move.has_state = not receives
        met = time.perf_counter()
        state, pause.num_bytes = exchange(
            packed, senders, receivers, replicas.control, job.templates() if receives else None
        )
        if move.joins:
            # This replica waited for the others to finish a step; that time is no part of the pause.
            pause.count_from(met, float(state.values["paused_seconds"]))
        return receives, state

    @staticmethod
    def _own_state(job: Resizable, move: Regrouping, whole: bool) -> State:
        # Read the clock first: joining replicas count the rest of the pause from the moment they meet the others.
        paused = time.perf_counter() - move.began
        own = job.local_state(whole)
        own.values.update(num_replicas=move.num_before, paused_seconds=paused)
        return own

    def await_plan(self, job: Resizable, above: int, problem: str) -> GenerationPlan:
        """Wait for the next plan. Without one, or on a request to stop, end, and save first if this replica is to."""
        membership = self._membership

        def look() -> GenerationPlan | str | None:
            if self.stop_wanted():
                return STOP
            return membership.newest(above) or ("given up" if membership.has_failed(above) is not None else None)

        try:
            found = membership.wait(look, _PATIENCE_SECONDS)
        except (dist.DistError, RuntimeError) as error:
            found, problem = None, f"{problem}; and the job's store does not answer: {error}"
        if isinstance(found, GenerationPlan):
            return found
        if self._states.now.has_state and self._is_first_left():
            job.save_alone()
        if found is None:
            membership.fail(above, problem)
        self._states.enter(Gone())
        raise JobLost(exit_codes.STOPPED if found == STOP else exit_codes.RESTART)

    def _is_first_left(self) -> bool:
        """Whether this replica is the one to save; without the job's store it is replica 0."""
        with contextlib.suppress(dist.DistError, RuntimeError):
            return self._membership.is_first_left(_FIRST_LEFT_SECONDS)
        return self._membership.rank == 0

    def _leave(self, job: Resizable, move: Regrouping) -> None:
        """End this process with exit code 0; nothing of the script runs afterwards."""
        membership, plan = self._membership, move.plan
        at_phase("leave", membership.rank)
        if plan.why != LOST and not plan.senders:
            # Other replicas may still be in a collective of the old groups.
            decided = None
            with contextlib.suppress(dist.DistError, RuntimeError):
                decided = membership.wait(lambda: self._decide_door(plan), _LEAVE_SECONDS)
            if decided == SHUT and move.can_stay:
                raise _Withdrawn(f"generation {plan.generation} was withdrawn: this replica stays")
        job.prepare_to_leave()
        self._states.enter(Gone())
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _roles(positions: Sequence[tuple[float, ...]], num_staying: int) -> tuple[list[int], list[int]]:
    """The replicas that are furthest, which send, and those of the first `num_staying` that are behind and receive."""
    furthest = max(positions)
    senders = [number for number, position in enumerate(positions) if position == furthest]
    return senders, [number for number, position in enumerate(positions[:num_staying]) if position != furthest]
