"""A job whose replicas change while it runs: what it lets go of, hands over and builds anew.

When and with whom is decided in `member`; the loop is in `job`.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable
from dataclasses import replace

import torch.distributed as dist
from torch import Tensor

from pollux.agent.checkpoint.training_state import State
from pollux.agent.distributed.device import gpu_type
from pollux.agent.distributed.process_group import WrappedModel, is_loss
from pollux.agent.distributed.sync_batchnorm import has_batchnorm, set_counted, synchronise_batchnorm
from pollux.agent.elastic.member import ElasticMember
from pollux.agent.job.persistence import SavedJob
from pollux.agent.reporting.reporter import ReportBuilder
from pollux.core.errors import PolluxError

__all__ = ["MovingJob"]

_log = logging.getLogger("pollux")
_BUFFERS = "buffers"
_LEAVE_SECONDS = 8.0


class MovingJob(SavedJob):
    """A job that can go on among other replicas; see `pollux.agent.elastic.resizable.Resizable` for who calls what."""

    _rng_texts: tuple[str, ...] = ()
    _epochs_wanted: int | None = None
    _left_loop: bool = False

    def attend(self) -> ElasticMember | None:
        """This replica's way to other generations, from now on with this job; None where nobody supervises it."""
        live = self._parts.live
        if live is not None:
            live.attend(self, self._parts.watch)
        return live

    def _forget_course(self) -> None:
        """Forget what the loop holds of the replicas before: data under way, and the state to roll back to."""
        raise AssertionError("the loop says what it holds")

    def _surviving(self, action: Callable[[], object]) -> bool:
        """Do something that other replicas take part in; False where some were lost and it is to be done anew.

        Where it returns, whoever is left has regrouped and stands at the last step that any of them finished.
        """
        live = self._parts.live
        if live is None:
            action()
            return True
        try:
            action()
        except (dist.DistError, RuntimeError) as error:
            if self.num_replicas == 1 or not is_loss(error):
                raise
            problem = str(error)
        else:
            return True
        # Not inside the handler: the traceback holds the wrapper, and with it the groups that must be let go.
        live.recover(self, problem)
        return False

    def position(self) -> tuple[int, ...]:
        """Steps, epoch, pass and place in it: whoever is further in this order holds the newer state."""
        return self._progress.steps, self._progress.epoch, self._loader.pass_index, self._loader.cursor

    def part_in_peace(self, same_size: bool, first_leaves: bool) -> None:
        """Bring together what replicas hold parts of, while all are there; a collective."""
        if not self._engine.counts_batchnorm:
            self._replicas.broadcast_buffers(self._engine.inner)
        self._merge_ledger()
        if first_leaves:
            self._hand_receipt_over()
        self._rng_texts = tuple(self._parts.state.rng_texts()) if same_size else ()

    def _hand_receipt_over(self) -> None:
        """Replica 0's receipt for all: what a script logs there only, and what was saved, is in no other."""
        checkpointer = self._parts.checkpointer
        if self.is_first and checkpointer is not None and not checkpointer.busy:
            self._note_saved()
        mine = json.dumps(self._receipt.state_dict()).encode() if self.is_first else b""
        first = self._replicas.gather_bytes(mine)[0]
        if not self.is_first:
            self._receipt.load_state_dict(json.loads(first))

    def drop_unfinished(self) -> None:
        """Forget the step under way. Samples that lost replicas had committed are known from the order of the pass."""
        with contextlib.suppress(dist.DistError, RuntimeError):
            self._engine.abandon()
        self._loader.rewind()
        self._loader.rebuild_ledger()
        self._forget_course()
        self._rng_texts = ()

    def disconnect(self) -> None:
        """Let go of every process group, and of all that holds one: processes that were forked have its sockets too."""
        self._forget_course()
        self._loader.end_workers()
        if self._engine.counts_batchnorm:
            synchronise_batchnorm(self._engine.inner, None)
        if self._parts.checkpointer is not None:
            self._parts.checkpointer.unbind()
        self._engine.disconnect()
        self._replicas.disconnect()

    def local_state(self, whole: bool) -> State:
        """Everything, without asking anybody; or what all replicas must have alike."""
        if not whole:
            return State(values={"adaptation": self._adaptation.state_dict(), "rng": list(self._rng_texts)})
        state = self._own_state(list(self._rng_texts))
        # Among the objects, which come from one sender: what replicas made of such buffers may differ.
        state.objects[_BUFFERS] = self._parts.state.unsaved_buffers()
        return state

    def sendable(self) -> State:
        """What would have to travel to a replica that joins, for a look whether it can."""
        state = self._parts.state.own(())
        state.objects["data.dataset"] = self._loader.dataset_state
        state.objects[_BUFFERS] = self._parts.state.unsaved_buffers()
        return state

    def templates(self) -> dict[str, Tensor]:
        """The model's own tensors, to be filled where they lie."""
        return self._parts.state.model_tensors()

    def settle(self, state: State, receives: bool) -> None:
        """Everything anew for the replicas there are now, from a state received or the own one."""
        parts, values = self._parts, state.values
        self._forget_course()
        self._resumed_at = None
        if receives:
            # Older releases send none.
            parts.state.take_buffers(state.objects.pop(_BUFFERS, {}))  # type: ignore[arg-type]
            self._restore(state, in_place=False)
            self._receipt.load_state_dict(values["receipt"])
            self._seconds_before = float(values["seconds"])
        self._loader.resize(self._replicas.replica, self._replicas.num_replicas)
        self._rebuild_engine()
        self._adaptation.regrouped(values["adaptation"], self.step)
        parts.state.restore_rng(values, self.step)
        self._rebind_checkpointer()
        parts.watch.regrouped()
        self._tell_anew()
        num_before, after = int(values["num_replicas"]), self.num_replicas
        text = f"from {num_before} to {after} replicas, without a restart"
        self._receipt.event("resized", self.step, self.progress, text, before=num_before, after=after)

    def _rebuild_engine(self) -> None:
        engine, replicas = self._engine, self._replicas
        synchronised = replicas.num_replicas > 1 and self._parts.sync_batchnorm and has_batchnorm(engine.inner)
        if synchronised:
            synchronise_batchnorm(engine.inner, dist.group.WORLD)
        engine.counts_batchnorm = synchronised
        engine.regroup()

    def _rebind_checkpointer(self) -> None:
        checkpointer = self._parts.checkpointer
        if checkpointer is not None:
            checkpointer.rebind(self._replicas.replica, self._replicas.num_replicas, self._replicas.control)

    def _tell_anew(self) -> None:
        """Reports come from replica 0, whichever process that is now; the last checkpoint may be another's."""
        parts, live, replicas = self._parts, self._parts.live, self._replicas
        if live is None:
            return
        generation = max(live.membership.ranks)
        environment = replace(
            parts.environment,
            replica=replicas.replica,
            num_replicas=replicas.num_replicas,
            num_nodes=replicas.num_nodes,
            generation=generation,
        )
        was_first, parts.environment = parts.environment.replica == 0, environment
        if parts.teller is not None and replicas.is_first:
            parts.teller.moved(environment)
        elif replicas.is_first:
            # What this process may have paused for when it began has been told by whoever was the first replica then.
            parts.teller = ReportBuilder.of(replace(environment, stopped_at=None), gpu_type(replicas.device))
            if parts.teller is not None and self._epochs_wanted is not None:
                parts.teller.wants_epochs(self._epochs_wanted)
        teller, checkpointer = parts.teller, parts.checkpointer
        known = teller is not None and was_first and teller.knows_of_checkpoint
        if teller is not None and checkpointer is not None and replicas.is_first and not known:
            # Whoever wrote it may be gone without a word.
            checkpointer.ask_created(teller.heard_of_save)
        if parts.scalars is not None:
            parts.scalars.moved(replicas.replica)

    def save_alone(self) -> None:
        """A checkpoint of what this replica holds, when there is nobody left to agree with."""
        self._parts.watch.ends()
        checkpointer = self._parts.checkpointer
        if checkpointer is None:
            return
        try:
            self._replicas.connect(0, 1, 1, None)
            checkpointer.rebind(0, 1, None)
            self._loader.resize(0, 1)
            self._left_loop = False
            self.checkpoint(wait=True)
        except (PolluxError, RuntimeError) as error:
            _log.error("the last steps were not saved: %s", error)

    def prepare_to_leave(self) -> None:
        """Write what is being written, let the folder go, and the groups."""
        parts = self._parts
        self._await_buffers()
        if parts.checkpointer is not None:
            # Whoever is first from now on saves soon; one that takes long to leave is ended.
            parts.checkpointer.close(_LEAVE_SECONDS)
        if parts.scalars is not None:
            # Nothing else runs before the process ends.
            parts.scalars.close()
        self._loader.close()
        self.disconnect()

    def _require_whole_model(self) -> None:
        """Notice that a replica was lost in a forward pass, in which layers talk to each other."""
        model = self._engine.model
        if isinstance(model, WrappedModel) and model.broken:
            problem, model.broken = model.broken, ""
            set_counted(self._engine.inner, True)
            raise RuntimeError(problem)
