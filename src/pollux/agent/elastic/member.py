"""A replica of a running job: it trains, moves to other generations, and recovers when other replicas are lost.

`generation_move` moves it; `elastic_job` is the job's part in that. The plan to move by comes from the job's shim.
In a live resize: after `agent.elastic.step_requests`, before `agent.elastic.generation_move` (docs/design/0016).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from dataclasses import replace

import torch.distributed as dist

from pollux.agent.checkpoint.state import State
from pollux.agent.distributed.process_group import ReplicaGroup, is_loss
from pollux.agent.elastic import generation_move
from pollux.agent.elastic.generation_move import GenerationMove, NotNeeded
from pollux.agent.elastic.heartbeat import HeartbeatSource, thread_clock, thread_is_held_up
from pollux.agent.elastic.member_states import FirstStep, Gone, Joining, StateTrack, Training
from pollux.agent.elastic.membership import Membership
from pollux.agent.elastic.resizable import Resizable
from pollux.agent.elastic.state_transfer import pack
from pollux.agent.elastic.step_requests import STOP, StepRequests
from pollux.agent.elastic.stray_collective import StrayCollectiveCheck
from pollux.core.errors import InvalidInput
from pollux.wire.live import keys
from pollux.wire.live.heartbeat import Activity, Heartbeat
from pollux.wire.live.plan import GenerationPlan

__all__ = ["ElasticMember", "refuse_all"]

_REFUSE_SECONDS = 0.2
_log = logging.getLogger("pollux")


class ElasticMember:
    """One replica in the generations of its job; `beat` makes its heartbeats, `states` has its state.

    `refusal` says why the job cannot change its replicas while it runs; empty where it can.
    """

    def __init__(self, membership: Membership, replicas: ReplicaGroup, joins: bool) -> None:
        self.membership = membership
        held_up = thread_is_held_up()
        self.beat = HeartbeatSource(worked=thread_clock(), held_up=lambda: replicas.num_replicas > 1 and held_up())
        self.refusal = ""
        self.states = StateTrack(Joining() if joins else Training())
        self.move = GenerationMove(membership, replicas, self.states, self.beat)
        self.stray_check = StrayCollectiveCheck(lambda why: membership.fail(membership.generation, why))
        self._replicas = replicas
        self._stepped_at = time.perf_counter()
        self._refused: set[int] = set()
        self._job: Resizable | None = None

    @property
    def joins(self) -> bool:
        """Whether this replica is joining, and has had no part in the job yet."""
        return self.states.now.joins

    def attach(self, job: Resizable, requests: StepRequests) -> None:
        """Set the job that moves, and the source of requests to stop, which end its waiting for other replicas."""
        self._job = job
        self.move.stop_wanted = lambda: requests.wants(STOP)
        if not self.joins:
            with contextlib.suppress(dist.DistError, RuntimeError):
                self.move.connections.publish(self.membership.generation)

    def free_from_lost(self) -> None:
        """Free the training thread from waiting for lost replicas; from any thread."""
        self.move.connections.free_from_lost()

    def send_heartbeat(self) -> None:
        """Send a heartbeat to the shim, if one is due."""
        self.stray_check.check()
        beat = self.beat.due()
        if beat is not None:
            self._send(beat)

    def _send(self, beat: Heartbeat) -> None:
        membership = self.membership
        membership.write(keys.beat(membership.generation, membership.rank), replace(beat, refusal=self.refusal))

    # At step boundaries

    def stepped(self, step: int) -> bool:
        """Note a step; returns whether it was the first one after a change, which ends the pause."""
        self.states.require_steps()
        self.beat.step = step
        self.beat.busy = Activity.TRAINING
        self._stepped_at = time.perf_counter()
        return self.end_pause()

    def end_pause(self) -> bool:
        """End the pause of a change: a step is done, or none comes next; returns whether there was one."""
        now = self.states.now
        if not isinstance(now, FirstStep):
            return False
        self.states.enter(Training())
        now.pause.end_part("first_step")
        rank = self._replicas.replica
        generation_move.at_phase("first step", rank)
        with contextlib.suppress(dist.DistError, RuntimeError):
            self.membership.write(keys.done(now.pause.plan.generation, rank), now.pause.report(self.beat.step))
        return True

    def start_activity(self, activity: Activity) -> None:
        """Note an activity that is no step, maybe of the user's own code; it ends the pause of a change."""
        self.end_pause()
        self.beat.busy = activity

    def finish(self) -> None:
        """Note that the job is done, so that no change of replicas waits for the rest of the script."""
        self.start_activity(Activity.FINISHED)
        with contextlib.suppress(dist.DistError, RuntimeError):
            self._send(self.beat.last())

    def wanted_generation(self) -> int | None:
        """The generation that this replica is to move to according to the plans; None for none."""
        plan = self.membership.newest()
        if plan is None or plan.generation in self._refused or self.membership.has_failed(plan.generation) is not None:
            return None
        return plan.generation

    def can_move(self, generation: int) -> bool:
        """Whether the job can move to a generation while it runs; if not, write why to the store.

        Called on replica 0 only, before any replica pauses.
        """
        why = self.refusal
        try:
            if not why:
                pack(State() if self._job is None else self._job.state_to_send())
        except InvalidInput as error:
            why = str(error)
        if why:
            if not self._refused:
                _log.warning("no change of replicas while the job runs: %s", why)
            self._refused.add(generation)
            self.membership.fail(generation, why)
        return not why

    def resize(self, job: Resizable, generation: int) -> None:
        """Move to that generation at a step boundary of all replicas; may end this process instead of returning."""
        plan = None
        with contextlib.suppress(dist.DistError, RuntimeError):
            plan = self.membership.plan(generation)
        if plan is None:
            # Without the store this replica cannot move; the others wait for it in vain, and report that.
            return
        self.states.require_steps()
        self.beat.busy = Activity.REGROUP
        is_broken = False
        # All replicas take part even if the plan was withdrawn, since some may not know that yet.
        try:
            generation_move.at_phase("boundary", self.membership.rank)
            same_size, first_leaves = plan.num_replicas == self._replicas.num_replicas, plan.rank_of(0) is None
            job.merge_parts(same_size, first_leaves)
        except (dist.DistError, RuntimeError) as error:
            if not is_loss(error):
                raise
            is_broken = True
        if is_broken:
            # A replica died meanwhile. The plan may still hold, if that replica was to leave.
            self.move.leave_broken_group(job)
        self.move.move_to(job, plan, self._stepped_at)

    def recover(self, job: Resizable, problem: str) -> None:
        """Continue without the replicas that were lost, from memory; ends this process where there is no plan."""
        _log.warning(
            "other replicas are lost (%s): waiting for a plan to continue without them", problem.splitlines()[0][:200]
        )
        self.beat.busy = Activity.REGROUP
        generation_move.at_phase("lost", self.membership.rank)
        self.move.leave_broken_group(job)
        self.move.move_to(job, self.move.await_plan(job, self.membership.generation, problem), self._stepped_at)

    def join(self, job: Resizable) -> None:
        """Report that this replica is built, wait until its generation is committed, and receive the state."""
        membership = self.membership
        generation_move.at_phase("prepare", membership.rank)
        membership.write(keys.ready(membership.generation, membership.rank))
        generation_move.at_phase("ready", membership.rank)
        plan = self._await_commit()
        if plan is None:
            self.states.enter(Gone())
            raise NotNeeded
        self.beat.busy = Activity.REGROUP
        self.move.move_to(job, plan, time.perf_counter())
        # Where no replica stays, all new ones run the script from its beginning, together.
        if not plan.senders:
            self.stray_check.watch_this_thread()

    def _await_commit(self) -> GenerationPlan | None:
        """Wait for the commit of this replica's generation; the plan to follow, None if the replica is not needed."""
        membership = self.membership
        generation = membership.generation
        while membership.withdrawn(generation) is None and not self.move.stop_wanted():
            committed = membership.committed()
            if committed >= generation:
                return membership.plan(generation) if committed == generation else membership.newest()
            time.sleep(0.005)
        return None


def refuse_all(membership: Membership, why: str) -> threading.Thread:
    """Refuse every later generation with `why`, from a thread, for jobs that move only by a restart."""
    beat = Heartbeat(-1, time.time(), Activity.TRAINING, refusal=why)

    def work() -> None:
        answered = membership.generation
        with contextlib.suppress(dist.DistError, RuntimeError):
            membership.write(keys.beat(membership.generation, membership.rank), beat)
            while True:
                committed = membership.committed()
                if committed > answered:
                    answered = committed
                    membership.fail(committed, why)
                time.sleep(_REFUSE_SECONDS)

    thread = threading.Thread(target=work, name="pollux-refuse", daemon=True)
    thread.start()
    return thread
