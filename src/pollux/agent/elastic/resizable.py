"""What a job must be able to do so that its replicas can change: the interface between `member` and the job."""

from __future__ import annotations

from typing import Any, Protocol

from pollux.agent.checkpoint.training_state import State

__all__ = ["Resizable"]


class Resizable(Protocol):
    """What a job does when its replicas change; see `pollux.agent.job.elastic_job.MovingJob`."""

    def position(self) -> tuple[int, ...]:
        """How far this replica has come; who is further holds the newer state."""

    def merge_parts(self, same_size: bool, first_leaves: bool) -> None:
        """The last collectives of the old generation; replica 0 may leave with what only it holds."""

    def drop_unfinished_step(self) -> None:
        """Forget the step that others never finished."""

    def disconnect(self) -> None:
        """Let go of all process groups, so that replicas that wait in one are freed."""

    def local_state(self, whole: bool) -> State:
        """What this replica holds, all of it, or only what everybody must have alike."""

    def templates(self) -> dict[str, Any]:
        """The tensors that a state may be received into."""

    def state_to_send(self) -> State:
        """What would have to travel, for a look whether it can."""

    def rebuild(self, state: State, receives: bool) -> None:
        """Go on among the new replicas, from a state that was received, or the own one.

        The values of it are on all replicas, `num_replicas` is how many there were before.
        """

    def save_alone(self) -> None:
        """Write a checkpoint without the others."""

    def prepare_to_leave(self) -> None:
        """Finish what was begun, and give up what others need."""
