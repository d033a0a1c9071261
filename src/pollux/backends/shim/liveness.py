"""Finds hung replicas of a job: those that have been silent for too long.

Pure: the shim decides what to do with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from pollux.wire.live.heartbeat import DEFAULT_HANG_SECONDS, Activity, Heartbeat

__all__ = ["CommitWatch", "ListeningClock", "LivenessTracker"]

# An announced activity may take this many times as long: heartbeats repeat it every second unless something blocks the
# interpreter. The same holds for a replica that waits for data while others wait for it, and for the silence of all.
_BUSY_TIMES = 10.0
# Heartbeats are sent and read once a second: replicas fell silent together if their last ones are no further apart.
_TOGETHER_SECONDS = 3.0
_TOGETHER_SHARE = 0.5
_LONGEST_GAP_SECONDS = 2.0
# Replicas read the keys of a change ten times a second, and agree on a boundary within two steps after that.
_MOST_STEPS = 50
_LEAST_BOUNDARY_SECONDS = 30.0


class ListeningClock:
    """Seconds in which this process ran and could receive heartbeats.

    A gap between two calls counts as two seconds at most: while the machine, or all processes of a job, stood still, no
    replica was silent.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last = clock()
        self._heard = 0.0

    def __call__(self) -> float:
        """Seconds so far."""
        now = self._clock()
        self._heard += min(max(now - self._last, 0.0), _LONGEST_GAP_SECONDS)
        self._last = now
        return self._heard

    def at(self, due: float) -> float:
        """A time of this clock as one of the underlying clock; earlier if a call is needed in between."""
        return self._last + min(due - self._heard, _LONGEST_GAP_SECONDS / 2)


@dataclass(slots=True)
class CommitWatch:
    """Notices that replicas go on taking steps although they were told to move to another generation."""

    _begun_at: float = 0.0
    _steps: Mapping[int, int] = field(default_factory=dict)

    def begin(self, steps: Mapping[int, int], now: float) -> None:
        """Note that all replicas are told to move now; `steps` are their steps so far, by number."""
        self._begun_at, self._steps = now, steps

    def why_ignored(self, steps: Mapping[int, int], now: float) -> str:
        """Why the change will never be completed, judged by the present steps; empty where it still may be."""
        if now < self._begun_at + _LEAST_BOUNDARY_SECONDS:
            return ""
        taken = min((step - self._steps[number] for number, step in steps.items() if number in self._steps), default=0)
        if taken <= _MOST_STEPS:
            return ""
        return f"{_MOST_STEPS} steps went by, and no replica moved to its new generation"


@dataclass(slots=True)
class _Sign:
    step: int
    busy: Activity
    at: float
    busy_seconds: float = 0.0
    waits: bool = False


@dataclass(slots=True)
class LivenessTracker:
    """The last heartbeat of each replica, by number. A replica has hung if it has stepped and is silent for too long.

    Too long means `hang_seconds`; ten times as long for a replica that announced a long activity; and
    `regroup_seconds` more for one that moves to another generation, as it may wait for others in the store. Ten times
    as long, too, where all replicas fell silent together, or where there is only one: they hold up no other replica,
    and the last copy of the state would be lost with them. `false_alarms` counts heartbeats of replicas that had been
    given up, for the reason in `words`. The replicas in `unheard` started together with the others and have sent
    nothing: once any replica has taken a step, all have, so they count as heard at that moment.
    """

    hang_seconds: float = DEFAULT_HANG_SECONDS
    regroup_seconds: float = 30.0
    false_alarms: int = 0
    words: dict[int, str] = field(default_factory=dict)
    unheard: set[int] = field(default_factory=set)
    _signs: dict[int, _Sign] = field(default_factory=dict)
    _given_up: set[int] = field(default_factory=set)

    def note_beat(self, number: int, beat: Heartbeat, now: float) -> None:
        """Note a heartbeat that differs from the one before."""
        if number in self._given_up:
            self.false_alarms += 1
            self._given_up.discard(number)
            return
        self.unheard.discard(number)
        if beat.step >= 0 and self.unheard:
            self._signs |= {other: _Sign(0, Activity.TRAINING, now) for other in self.unheard}
            self.unheard.clear()
        self._signs[number] = _Sign(beat.step, beat.activity, now, beat.busy_seconds, beat.waiting)

    def keep(self, numbers: Iterable[int]) -> None:
        """Forget all replicas but these."""
        kept = set(numbers)
        self.unheard &= kept
        self._signs = {number: sign for number, sign in self._signs.items() if number in kept}

    def drop(self, number: int) -> None:
        """Forget a replica that has ended."""
        self._signs.pop(number, None)
        self.unheard.discard(number)

    def renew(self, number: int) -> None:
        """Forget the replica that had this number: a new one has it now."""
        self.drop(number)
        self._given_up.discard(number)

    def settle(self, numbers: Iterable[int], now: float) -> None:
        """Make these the replicas, each of which has just taken its first step in a new generation."""
        steps = self.steps()
        self.unheard.clear()
        self._signs = {number: _Sign(max(steps.get(number, 0), 0), Activity.TRAINING, now) for number in numbers}

    def steps(self) -> dict[int, int]:
        """The last step that each replica has reported."""
        return {number: sign.step for number, sign in self._signs.items()}

    def is_finished(self) -> bool:
        """Whether a replica has reported that the job is finished."""
        return any(sign.busy == Activity.FINISHED for sign in self._signs.values())

    def silent(self, now: float) -> list[int]:
        """The replicas that have hung; each is returned once, and never all that hold the state at once."""
        found = sorted((n for n in self._signs if self._due_of(n) <= now), key=lambda n: self._signs[n].at)
        holders = [number for number in found if self._signs[number].step >= 0]
        if len(holders) == len(self._holders()):
            # The first to fall silent may hold up the others, which will be heard again once it has ended.
            for number in holders[1:]:
                self._signs[number].at = now
                found.remove(number)
        words = {number: self._words(self._signs[number], self._due_of(number), now) for number in found}
        self.words.update(words)
        for number in found:
            del self._signs[number]
            self._given_up.add(number)
        return found

    def _words(self, sign: _Sign, due: float, now: float) -> str:
        if sign.busy == Activity.DATA and sign.busy_seconds:
            return f"no data came for {sign.busy_seconds + now - sign.at:.0f} s, and others wait for it"
        return f"no heartbeat for {round(due - sign.at, 3):g} s"

    @property
    def due(self) -> float | None:
        """When the next replica counts as hung, if no heartbeat comes."""
        at = min((self._due_of(number) for number in self._signs), default=float("inf"))
        return None if at == float("inf") else at

    def _due_of(self, number: int) -> float:
        sign = self._signs[number]
        if sign.busy == Activity.FINISHED or (sign.step < 0 and not sign.busy):
            return float("inf")
        return sign.at + self._patience(sign)

    def _patience(self, sign: _Sign) -> float:
        """Seconds that a replica may be silent after this heartbeat."""
        most = self.hang_seconds * _BUSY_TIMES
        if sign.busy == Activity.DATA and any(other.waits for other in self._signs.values()):
            return max(most - sign.busy_seconds, 0.0)
        if sign.step >= 0 and not self._is_outlived(sign):
            return most
        if sign.busy == Activity.REGROUP:
            return self.hang_seconds + self.regroup_seconds
        return most if sign.busy else self.hang_seconds

    def _holders(self) -> list[_Sign]:
        """The heartbeats of replicas that hold the state, which have stepped; joiners hold none yet."""
        return [sign for sign in self._signs.values() if sign.step >= 0]

    def _is_outlived(self, sign: _Sign) -> bool:
        """Whether another replica that holds the state sent a heartbeat clearly later."""
        apart = min(_TOGETHER_SECONDS, self.hang_seconds * _TOGETHER_SHARE)
        return any(other.at > sign.at + apart for other in self._holders())
