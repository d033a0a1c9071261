"""Signs of life of a job's replicas: who has been silent for too long. Pure; what is done about it is the shim's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from pollux.wire.live.heartbeat import Activity, Heartbeat

__all__ = ["DEFAULT_HANG_SECONDS", "CommitWatch", "ListeningClock", "LivenessTracker"]

DEFAULT_HANG_SECONDS = 30.0
"""How long a replica that trains may be silent."""

# What is announced may take long, and is told again every second, unless something holds the whole interpreter up. So
# long, too, one may wait for data while others wait for it, and all may be silent together.
_BUSY_TIMES = 10.0
# Beats come once a second, and are looked for as often: silent together are those whose last ones are no further apart.
_TOGETHER_SECONDS = 3.0
_TOGETHER_SHARE = 0.5
_LONGEST_GAP_SECONDS = 2.0
# Replicas agree on a boundary within two steps of hearing of a change, and they listen ten times a second.
_MOST_STEPS = 50
_LEAST_BOUNDARY_SECONDS = 30.0


class ListeningClock:
    """Seconds in which this process ran and could hear something, by another clock.

    A gap between two looks counts as two seconds at most: where a machine, or all processes of a job, stood still,
    nobody was silent meanwhile.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last = clock()
        self._heard = 0.0

    def __call__(self) -> float:
        """Seconds that were lived through so far."""
        now = self._clock()
        self._heard += min(max(now - self._last, 0.0), _LONGEST_GAP_SECONDS)
        self._last = now
        return self._heard

    def at(self, due: float) -> float:
        """When a time of this clock comes on the other one, or when to look in between, so that no gap is too long."""
        return self._last + min(due - self._heard, _LONGEST_GAP_SECONDS / 2)


@dataclass(slots=True)
class CommitWatch:
    """Notices that replicas take step after step, though they were told to go to another generation."""

    _begun_at: float = 0.0
    _steps: Mapping[int, int] = field(default_factory=dict)

    def begin(self, steps: Mapping[int, int], now: float) -> None:
        """Everybody is told to go now; these are their steps so far, by number."""
        self._begun_at, self._steps = now, steps

    def why_ignored(self, steps: Mapping[int, int], now: float) -> str:
        """Why the change will not come about, by the steps that they have taken now; empty where it still may."""
        if now < self._begun_at + _LEAST_BOUNDARY_SECONDS:
            return ""
        taken = min((step - self._steps[number] for number, step in steps.items() if number in self._steps), default=0)
        if taken <= _MOST_STEPS:
            return ""
        return f"{_MOST_STEPS} steps went by, and no replica went to its new generation"


@dataclass(slots=True)
class _Sign:
    step: int
    busy: Activity
    at: float
    busy_seconds: float = 0.0
    waits: bool = False


@dataclass(slots=True)
class LivenessTracker:
    """The last beat of each replica, by its number. Hung is who has stepped, and is silent for `hang_seconds`.

    Who announced something long is given ten times as much; who goes to another generation, `regroup_seconds` more,
    while which it may wait for others in the store. So much, too, is given to replicas that fell silent together, all
    of them, and to one that is the only one: nobody is known to be held up by them, and with them goes the last copy of
    the state. `false_alarms` counts beats that came after their replica had been given up, for the reason in `words`.
    Those in `unheard` began together with the others: once one of them has taken a step, all have, and who still says
    nothing counts as if it had spoken then.
    """

    hang_seconds: float = DEFAULT_HANG_SECONDS
    regroup_seconds: float = 30.0
    false_alarms: int = 0
    words: dict[int, str] = field(default_factory=dict)
    unheard: set[int] = field(default_factory=set)
    _signs: dict[int, _Sign] = field(default_factory=dict)
    _given_up: set[int] = field(default_factory=set)

    def heard(self, number: int, beat: Heartbeat, now: float) -> None:
        """A beat that differs from the one before."""
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
        """Forget all others."""
        kept = set(numbers)
        self.unheard &= kept
        self._signs = {number: sign for number, sign in self._signs.items() if number in kept}

    def drop(self, number: int) -> None:
        """It has ended."""
        self._signs.pop(number, None)
        self.unheard.discard(number)

    def renew(self, number: int) -> None:
        """The number is another replica's from now on."""
        self.drop(number)
        self._given_up.discard(number)

    def settle(self, numbers: Iterable[int], now: float) -> None:
        """These are the replicas now, and each has just taken its first step among them."""
        steps = self.steps()
        self.unheard.clear()
        self._signs = {number: _Sign(max(steps.get(number, 0), 0), Activity.TRAINING, now) for number in numbers}

    def steps(self) -> dict[int, int]:
        """The last step that each has told of."""
        return {number: sign.step for number, sign in self._signs.items()}

    def is_finished(self) -> bool:
        """Whether one says that the job is through."""
        return any(sign.busy == Activity.FINISHED for sign in self._signs.values())

    def silent(self, now: float) -> list[int]:
        """Those that are hung at this time; each is named once, and never all that hold the state at once."""
        found = sorted((n for n in self._signs if self._due_of(n) <= now), key=lambda n: self._signs[n].at)
        holders = [number for number in found if self._signs[number].step >= 0]
        if len(holders) == len(self._holders()):
            # Whoever fell silent first may hold the others up, which are heard again once it is gone.
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
        return f"no sign of life for {round(due - sign.at, 3):g} s"

    @property
    def due(self) -> float | None:
        """When the next one counts as hung, if nothing is heard."""
        at = min((self._due_of(number) for number in self._signs), default=float("inf"))
        return None if at == float("inf") else at

    def _due_of(self, number: int) -> float:
        sign = self._signs[number]
        if sign.busy == Activity.FINISHED or (sign.step < 0 and not sign.busy):
            return float("inf")
        return sign.at + self._patience(sign)

    def _patience(self, sign: _Sign) -> float:
        """Seconds that a replica may be silent after this sign of life."""
        most = self.hang_seconds * _BUSY_TIMES
        if sign.busy == Activity.DATA and any(other.waits for other in self._signs.values()):
            return max(most - sign.busy_seconds, 0.0)
        if sign.step >= 0 and not self._is_outlived(sign):
            return most
        if sign.busy == Activity.REGROUP:
            return self.hang_seconds + self.regroup_seconds
        return most if sign.busy else self.hang_seconds

    def _holders(self) -> list[_Sign]:
        """Those that have stepped: who joins holds nothing yet, and says nothing about the others."""
        return [sign for sign in self._signs.values() if sign.step >= 0]

    def _is_outlived(self, sign: _Sign) -> bool:
        """Whether another one that holds the state was heard clearly later."""
        apart = min(_TOGETHER_SECONDS, self.hang_seconds * _TOGETHER_SHARE)
        return any(other.at > sign.at + apart for other in self._holders())
