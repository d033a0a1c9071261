"""The job's part in a change of its replicas: what it releases, sends and rebuilds.

`pollux.agent.elastic.member` decides when, and with which replicas.
In a live resize: after `agent.elastic.generation_move`; the job's next step follows (docs/design/0016).
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from pollux.agent.checkpoint.state import State
from pollux.agent.distributed.process_group import is_loss
from pollux.agent.distributed.sync_batchnorm import has_batchnorm, synchronise_batchnorm
from pollux.agent.job.run import JobRun
from pollux.core.errors import PolluxError

__all__ = ["ElasticJob"]

_log = logging.getLogger("pollux")
_BUFFERS = "buffers"
_LEAVE_SECONDS = 8.0


class ElasticJob:
    """A job for `ElasticMember`; see `pollux.agent.elastic.resizable.Resizable` for each method.

    `saved_alone` says that this replica has saved its state without other replicas, and ends.
    """

    def __init__(self, run: JobRun) -> None:
        self._run = run
        self._parts = run.parts
        self._rng_texts: tuple[str, ...] = ()
        self.saved_alone = False

    def survive_loss(self, action: Callable[[], object]) -> bool:
        """Run an action with other replicas; false where some were lost, so that the caller must run it again.

        Then the replicas that are left are at the last step that one of them finished.
        """
        member = self._parts.member
        if member is None:
            action()
            return True
        try:
            action()
        except (dist.DistError, RuntimeError) as error:
            if self._parts.replicas.num_replicas == 1 or not is_loss(error):
                raise
            problem = str(error)
        else:
            return True
        # Outside of the handler, whose traceback holds the wrapper and with it the groups that must be released.
        member.recover(self, problem)
        return False

    def _reset_loop(self) -> None:
        """Forget what the loop has from the old replicas: data drawn ahead, and the state to roll back to."""
        self._run.oom.end_trial()
        self._run.feed.forget()
        self._run.rounds.forget()

    def position(self) -> tuple[int, ...]:
        """Steps, epoch, pass and place in the pass: the replica with the greatest has the newest state."""
        progress, loader = self._parts.progress, self._parts.loader
        return progress.steps, progress.epoch, loader.pass_index, loader.cursor

    def merge_parts(self, same_size: bool, first_leaves: bool) -> None:
        """Merge the state that is spread over replicas, while all are there; a collective."""
        self._run.persistence.merge_shares()
        if first_leaves:
            self._hand_receipt_over()
        self._rng_texts = tuple(self._parts.state.rng_texts()) if same_size else ()

    def _hand_receipt_over(self) -> None:
        """Copy replica 0's receipt to all: it alone has the saves, and maybe the script's metrics."""
        parts, is_first = self._parts, self._parts.replicas.is_first
        if is_first and parts.checkpointer is not None and not parts.checkpointer.busy:
            self._run.persistence.confirm_save()
        mine = json.dumps(parts.receipt.state_dict()).encode() if is_first else b""
        first = parts.replicas.gather_bytes(mine)[0]
        if not is_first:
            parts.receipt.load_state_dict(json.loads(first))

    def drop_unfinished_step(self) -> None:
        """Drop the step under way; the order of the pass tells which samples lost replicas had committed."""
        with contextlib.suppress(dist.DistError, RuntimeError):
            self._parts.engine.abandon()
        self._parts.loader.rewind()
        self._parts.loader.rebuild_ledger()
        self._reset_loop()
        self._rng_texts = ()

    def disconnect(self) -> None:
        """Release all process groups and what holds them; worker processes, which have copies of sockets, end."""
        parts = self._parts
        self._reset_loop()
        parts.loader.end_workers()
        if parts.engine.counts_batchnorm:
            synchronise_batchnorm(parts.engine.inner, None)
        if parts.checkpointer is not None:
            parts.checkpointer.unbind()
        parts.engine.disconnect()
        parts.replicas.disconnect()

    def local_state(self, whole: bool) -> State:
        """The whole state, without a collective; or the values that all replicas must have alike."""
        if not whole:
            return State(values={"adaptation": self._parts.adaptation.state_dict(), "rng": list(self._rng_texts)})
        state = self._run.persistence.own_state(list(self._rng_texts))
        # Sent as objects, by one sender: these buffers may differ between replicas.
        state.objects[_BUFFERS] = self._parts.state.unsaved_buffers()
        return state

    def state_to_send(self) -> State:
        """The state that a joining replica would receive, to find out whether it can be sent."""
        state = self._parts.state.own(())
        state.objects["data.dataset"] = self._parts.loader.dataset_state
        state.objects[_BUFFERS] = self._parts.state.unsaved_buffers()
        return state

    def templates(self) -> dict[str, Tensor]:
        """The model's own tensors, to be filled in place."""
        return self._parts.state.model_tensors()

    def rebuild(self, state: State, receives: bool) -> None:
        """Rebuild the job for the new replicas, from the received state or from this replica's own."""
        parts, values = self._parts, state.values
        self._reset_loop()
        self._run.persistence.forget_resume()
        if receives:
            parts.state.set_buffers(state.objects.pop(_BUFFERS))  # type: ignore[arg-type]
            self._run.persistence.restore(state, in_place=False)
            self._run.persistence.restore_record(values)
        replicas = parts.replicas
        parts.loader.resize(replicas.replica, replicas.num_replicas)
        self._rebuild_engine()
        parts.adaptation.regrouped(values["adaptation"], parts.progress.steps)
        parts.state.restore_rng(values, parts.progress.steps)
        if parts.checkpointer is not None:
            parts.checkpointer.rebind(replicas.replica, replicas.num_replicas, replicas.control)
        parts.requests.start_among_new_replicas()
        parts.rates.restart()
        self._change_reports()
        before, after = int(values["num_replicas"]), replicas.num_replicas
        text = f"from {before} to {after} replicas, without a restart"
        self._run.record.event("resized", text, before=before, after=after)

    def _rebuild_engine(self) -> None:
        engine, replicas = self._parts.engine, self._parts.replicas
        synchronised = replicas.num_replicas > 1 and self._parts.sync_batchnorm and has_batchnorm(engine.inner)
        if synchronised:
            synchronise_batchnorm(engine.inner, dist.group.WORLD)
        engine.counts_batchnorm = synchronised
        engine.regroup()

    def _change_reports(self) -> None:
        """Let the new replica 0 send reports; another process may have written the last checkpoint."""
        member, checkpointer = self._parts.member, self._parts.checkpointer
        if member is None:
            return
        asks_age = self._run.record.enter_generation(max(member.membership.ranks))
        if asks_age and checkpointer is not None:
            # The process that wrote the checkpoint may have ended without reporting the time.
            checkpointer.find_created(self._run.record.reports.note_save_elsewhere)

    def save_alone(self) -> None:
        """Save this replica's state, where there is no other replica to agree with."""
        parts = self._parts
        parts.requests.mark_stopping()
        if parts.checkpointer is None:
            return
        try:
            parts.replicas.connect(0, 1, 1, None)
            parts.checkpointer.rebind(0, 1, None)
            parts.loader.resize(0, 1)
            self.saved_alone = True
            self._run.persistence.checkpoint(wait=True)
        except (PolluxError, RuntimeError) as error:
            _log.error("the last steps were not saved: %s", error)

    def prepare_to_leave(self) -> None:
        """Finish the save in flight, and release the checkpoint folder and the process groups."""
        parts = self._parts
        self._run.persistence.await_buffers()
        if parts.checkpointer is not None:
            # The new replica 0 saves soon, and a replica that takes long to leave is killed.
            parts.checkpointer.close(_LEAVE_SECONDS)
        # The process ends without running exit handlers.
        self._run.record.scalars.close()
        parts.loader.close()
        self.disconnect()
