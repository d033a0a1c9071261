"""The replicas of a generation: which of them are part of the job now, and which have left it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pollux.backends.process.launcher import ReplicaProcess
from pollux.backends.shim.output import ReplicaLog

__all__ = ["GenerationReplicas", "RunningReplica"]


@dataclass(slots=True)
class RunningReplica:
    """One replica: its process, its log, and how it ended.

    A replica keeps its `number` as long as its process lives; its `rank` may change. A joiner has the rank that it is
    going to have, a departed replica the last one that it had. `code` is None while the process runs.
    """

    number: int
    rank: int
    place: str
    process: ReplicaProcess
    log: ReplicaLog
    code: int | None = None
    ended_at: float = 0.0

    @property
    def output(self) -> int:
        """The reading end of its output; -1 for none."""
        return self.process.output


@dataclass(slots=True)
class GenerationReplicas:
    """`members` are part of the job now. `departed` replicas are not, but may still run or have output to read."""

    members: list[RunningReplica] = field(default_factory=list)
    departed: list[RunningReplica] = field(default_factory=list)

    @property
    def everyone(self) -> tuple[RunningReplica, ...]:
        """Members, then departed replicas."""
        return (*self.members, *self.departed)

    @property
    def living_members(self) -> list[RunningReplica]:
        """The members whose process runs."""
        return [member for member in self.members if member.code is None]

    @property
    def living(self) -> list[RunningReplica]:
        """Members and departed replicas whose process runs."""
        return [replica for replica in self.everyone if replica.code is None]

    @property
    def are_up(self) -> bool:
        """Whether each member is a process, or was one."""
        return all(member.process.up or member.code is not None for member in self.members)

    def unused_numbers(self, count: int) -> list[int]:
        """This many numbers that no running process has, and no output that is still being read."""
        used = {replica.number for replica in self.everyone if replica.code is None or replica.output >= 0}
        return [number for number in range(len(used) + count) if number not in used][:count]

    def depart(self, member: RunningReplica) -> None:
        """Make a member a departed replica."""
        self.members.remove(member)
        self.departed.append(member)

    def sort_members(self, ranks: Mapping[int, int]) -> list[RunningReplica]:
        """Order the members by these ranks (by number), and return those that have none."""
        without = [member for member in self.members if member.number not in ranks]
        self.members.sort(key=lambda member: ranks.get(member.number, len(self.members)))
        return without

    def forget_ended(self) -> None:
        """Forget departed replicas whose process has ended and whose output has been read."""
        self.departed = [each for each in self.departed if each.code is None or each.output >= 0]

    def note_end(self, is_it: Callable[[ReplicaProcess], bool], code: int) -> RunningReplica | None:
        """Note the exit code of the process for which `is_it` holds; the replica, if it was a member."""
        for replica in self.living:
            if is_it(replica.process):
                replica.code, replica.ended_at = code, time.time()
                return replica if replica in self.members else None
        return None
