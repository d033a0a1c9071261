"""The states of a replica in the generations of its job, a class for each, and which state may follow which.

`member` and `generation_move` act on them.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from pollux.agent.elastic.pause import ResizePause
from pollux.core.errors import IllegalTransition
from pollux.wire.live.plan import GenerationPlan

__all__ = ["CutOff", "FirstStep", "Gone", "Joining", "MemberState", "Regrouping", "StateName", "StateTrack", "Training"]

StateName = Literal["joining", "training", "first step", "regrouping", "cut off", "gone"]
"""The states; each is described by its class."""

_STORY_LINES = 30
_NEXT: Mapping[StateName, frozenset[StateName]] = {
    "joining": frozenset({"regrouping", "gone"}),
    "training": frozenset({"regrouping", "cut off"}),
    "first step": frozenset({"training", "regrouping", "cut off"}),
    "regrouping": frozenset({"training", "first step", "cut off", "gone"}),
    "cut off": frozenset({"regrouping", "cut off", "gone"}),
    "gone": frozenset(),
}


@dataclass(slots=True)
class MemberState:
    """A state. `joins`: the replica has had no part in the job yet. `has_state`: it holds the job's whole state."""

    name: ClassVar[StateName]
    takes_steps: ClassVar[bool] = False
    joins: bool = field(default=False, kw_only=True)
    has_state: bool = field(default=True, kw_only=True)


@dataclass(slots=True)
class Joining(MemberState):
    """The replica is built, and waits for its generation."""

    name = "joining"
    joins: bool = field(default=True, kw_only=True)
    has_state: bool = field(default=False, kw_only=True)


@dataclass(slots=True)
class Training(MemberState):
    """The replica takes steps with the others of its generation."""

    name = "training"
    takes_steps = True


@dataclass(slots=True)
class FirstStep(MemberState):
    """The replica has moved to a generation; the pause ends with its first step there."""

    name = "first step"
    takes_steps = True
    pause: ResizePause


@dataclass(slots=True)
class Regrouping(MemberState):
    """The replica moves to the generation of a plan, from the state `before`.

    `began` is the end of the last step, `num_before` the number of replicas before.
    """

    name = "regrouping"
    plan: GenerationPlan
    before: MemberState
    began: float
    num_before: int

    def __post_init__(self) -> None:
        self.joins, self.has_state = self.before.joins, self.before.has_state

    @property
    def can_stay(self) -> bool:
        """Whether all replicas still have the old process groups, so that they can continue in them."""
        return self.before.takes_steps


@dataclass(slots=True)
class CutOff(MemberState):
    """The replica has left its process groups, and waits for a plan."""

    name = "cut off"


@dataclass(slots=True)
class Gone(MemberState):
    """The replica ends."""

    name = "gone"


class StateTrack:
    """The present state of a replica, and its last states."""

    def __init__(self, first: MemberState) -> None:
        self.now = first
        self._story = collections.deque([first.name], maxlen=_STORY_LINES)

    def enter(self, state: MemberState) -> None:
        """Enter another state; `IllegalTransition` where it cannot follow the present one."""
        if state.name not in _NEXT[self.now.name]:
            raise self._illegal(f"become '{state.name}'")
        self.now = state
        self._story.append(state.name)

    def require_steps(self) -> None:
        """Raise `IllegalTransition` where a replica in this state takes no steps."""
        if not self.now.takes_steps:
            raise self._illegal("take a step")

    def _illegal(self, what: str) -> IllegalTransition:
        story = ", ".join(self._story)
        return IllegalTransition(f"a replica that is '{self.now.name}' cannot {what}; its states so far: {story}")
