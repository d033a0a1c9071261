"""The interface by which `member` changes the replicas of a job."""

from __future__ import annotations

from typing import Any, Protocol

from pollux.agent.checkpoint.state import State

__all__ = ["Resizable"]


class Resizable(Protocol):
    """A job whose replicas can change: `pollux.agent.job.elastic_job.ElasticJob`, and others in tests."""

    def position(self) -> tuple[int, ...]:
        """How far this replica has trained; the one that is furthest has the newest state."""

    def merge_parts(self, same_size: bool, first_leaves: bool) -> None:
        """Run the last collectives of the old generation: share what only one replica has."""

    def drop_unfinished_step(self) -> None:
        """Forget the step that not all replicas finished."""

    def disconnect(self) -> None:
        """Leave all process groups, which frees replicas that wait in one."""

    def local_state(self, whole: bool) -> State:
        """This replica's state, or only the values that must be equal on all replicas."""

    def templates(self) -> dict[str, Any]:
        """The tensors to receive a state into."""

    def state_to_send(self) -> State:
        """The state that a joining replica would receive, to find out whether it can be sent."""

    def rebuild(self, state: State, receives: bool) -> None:
        """Rebuild the job for the new replicas, from a received state or from this replica's own.

        All replicas have its values; `num_replicas` among them is the number of replicas before.
        """

    def save_alone(self) -> None:
        """Write a checkpoint without other replicas."""

    def prepare_to_leave(self) -> None:
        """Finish a save in flight, and release what other replicas need."""
