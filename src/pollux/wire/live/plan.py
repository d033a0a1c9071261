"""The plan of a generation: its replicas, their ranks before, and how long they may wait."""

from __future__ import annotations

from dataclasses import dataclass, field

from pollux.wire.live.codec import MalformedValue, decode, encode

__all__ = ["LOST", "RESIZE", "GenerationPlan", "PlanDeadlines", "PlanMember"]

RESIZE = "resize"
"""Why there is a plan: the service wants other replicas."""

LOST = "lost"
"""Why there is a plan: some replicas were lost."""

_MAX_REPLICAS = 100_000


@dataclass(frozen=True, slots=True)
class PlanMember:
    """One replica of a generation: its rank there, and its rank in the generation before; None if it joins."""

    rank: int
    was: int | None


@dataclass(frozen=True, slots=True)
class PlanDeadlines:
    """Seconds that replicas wait: for all others (`join`), for the process group, and for the state."""

    join: float = 30.0
    regroup: float = 10.0
    transfer: float = 30.0


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """A generation: its members by rank, and the generation `before` it, in which they had their old ranks.

    `senders` are old ranks of replicas that send the state and leave, if no member has it.
    """

    generation: int
    before: int
    members: tuple[PlanMember, ...]
    num_nodes: int = 1
    why: str = RESIZE
    deadlines: PlanDeadlines = field(default_factory=PlanDeadlines)
    senders: tuple[int, ...] = ()

    @classmethod
    def decode(cls, text: str | bytes) -> GenerationPlan:
        """The plan that `encode` wrote; `MalformedValue` for any other text."""
        plan = decode(cls, text)
        if [member.rank for member in plan.members] != [*range(len(plan.members))]:
            raise MalformedValue("the members of a plan are not in the order of their ranks")
        if len(plan.members) + len(plan.senders) > _MAX_REPLICAS:
            raise MalformedValue(f"a plan has more than {_MAX_REPLICAS} replicas")
        return plan

    def encode(self) -> str:
        """The plan as the store holds it."""
        return encode(self)

    @property
    def num_replicas(self) -> int:
        """How many replicas the generation has."""
        return len(self.members)

    @property
    def num_present(self) -> int:
        """How many replicas take part in the resize: its members and, numbered after them, its senders."""
        return self.num_replicas + len(self.senders)

    def rank_of(self, was: int) -> int | None:
        """The new rank of the replica with this old rank; None if it leaves."""
        return next((member.rank for member in self.members if member.was == was), None)

    def place_of_sender(self, was: int) -> int | None:
        """The number, among all that take part, of the sender with this old rank; None if it is not a sender."""
        return self.num_replicas + self.senders.index(was) if was in self.senders else None

    def kind(self, num_before: int) -> str:
        """The kind of the resize, for a job of that many replicas: "grow", "shrink", "move" or "recover"."""
        if self.why == LOST:
            return "recover"
        if self.num_replicas == num_before:
            return "move"
        return "grow" if self.num_replicas > num_before else "shrink"
