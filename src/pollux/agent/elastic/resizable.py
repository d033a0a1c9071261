"""What a job must be able to do so that its replicas can change: the interface between `member` and the job."""

from __future__ import annotations

from typing import Any, Protocol

from pollux.agent.checkpoint.state import State

__all__ = ["Resizable"]


class Resizable(Protocol):
    """What a job does when its replicas change; see `pollux.agent.job.elastic_job.ElasticJob`."""

    def position(self) -> tuple[int, ...]:
        """How far this replica has come; a replica that is further holds the newer state."""

    def merge_parts(self, same_size: bool, first_leaves: bool) -> None:
        """The last collectives of the old generation: give all replicas what one of them holds alone."""

    def drop_unfinished_step(self) -> None:
        """Forget the step that not all replicas finished."""

    def disconnect(self) -> None:
        """Let go of all process groups, so that replicas that wait in one are freed."""

    def local_state(self, whole: bool) -> State:
        """What this replica holds: all of it, or only what must be equal on all replicas."""

    def templates(self) -> dict[str, Any]:
        """The tensors that a state may be received into."""

    def state_to_send(self) -> State:
        """What would have to travel to another replica; looked at to find out whether it can."""

    def rebuild(self, state: State, receives: bool) -> None:
        """Go on with the new replicas, from a state that was received or from this replica's own.

        All replicas have its values; `num_replicas` among them is how many replicas there were before.
        """

    def save_alone(self) -> None:
        """Write a checkpoint without the others."""

    def prepare_to_leave(self) -> None:
        """Finish a save that was begun, and release what other replicas need."""
