"""Tests that every store and every telemetry must pass; its author inherits them.

    class TestMine(StoreConformance):
        @pytest.fixture
        def store(self) -> Iterator[Store]: ...

A store that outlives its process inherits `DurableStoreConformance`, which needs a fixture `reopen`, too.
"""

from __future__ import annotations

import itertools
import json
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest

from pollux.controller import (
    DecisionMade,
    Event,
    JobPaused,
    JobReported,
    JobSpec,
    JobSubmitted,
    NodeAdded,
    QueueChanged,
)
from pollux.core import Decision, InvalidInput, JobLimits, Node, Queue, Reason
from pollux.store import SavedState, Store, Telemetry, TelemetryRow
from pollux.testing.builders import SaturatingGoodput, goodput_model, place
from pollux.testing.waiting import PATIENCE_SECONDS

__all__ = [
    "DurableStoreConformance",
    "DurableTelemetryConformance",
    "StoreConformance",
    "TelemetryConformance",
    "facts",
]


def facts(first: int, count: int) -> list[Event]:
    """Small facts; the time of each is its number."""
    return [JobPaused(float(number), f"job-{number}") for number in range(first, first + count)]


def _several_kinds() -> list[Event]:
    reason = Reason("shrunk", {"goodput": 12.5, "share": math.inf})
    return [
        NodeAdded(1.0, Node("n0", 8, "a100", 64.0)),
        QueueChanged(2.0, Queue("batch", 2.0, 5)),
        JobSubmitted(3.0, JobSpec("j", JobLimits(2, 8, gpu_types=("a100",)), queue="batch", after=("i",))),
        JobReported(4.0, "j", goodput_model(), 1e6, 12.0, 64),
        DecisionMade(5.0, 4, Decision({"j": place("n0:4")}, 3, {"j": reason}), partial=True),
    ]


class StoreConformance:
    """The log, its snapshots and settings, as `pollux.store.Store` promises them."""

    @pytest.fixture
    def store(self) -> Store:
        """An empty store; this fixture also closes it."""
        raise pytest.UsageError(f"{type(self).__name__} needs a fixture 'store' that gives an empty store")

    def test_is_empty_at_first(self, store: Store) -> None:
        """No event, no snapshot, no setting; an empty batch changes nothing."""
        assert (store.revision, list(store.read()), store.load(), store.setting("x")) == (0, [], None, None)
        assert store.append([]) == 0
        assert store.trim(math.inf) == 0

    def test_keeps_order_and_counts_from_one(self, store: Store) -> None:
        """This holds over several batches."""
        assert store.append(facts(1, 3)) == 3
        assert store.append(facts(4, 1)) == 4
        assert store.append([]) == store.revision == 4
        assert list(store.read()) == list(enumerate(facts(1, 4), start=1))

    def test_order_is_not_that_of_time(self, store: Store) -> None:
        """An event may be older than the one before it."""
        events = [JobPaused(at, "j") for at in (5.0, 3.0, 9.0, 3.0)]
        store.append(events)
        assert [event for _, event in store.read()] == events

    def test_every_kind_comes_back_whole(self, store: Store) -> None:
        """Models, reasons and infinities are included."""
        events = _several_kinds()
        store.append(events)
        again = [event for _, event in store.read()]
        assert again == events
        report = again[3]
        assert isinstance(report, JobReported)
        assert report.goodput == goodput_model()

    @pytest.mark.parametrize("after", [0, 1, 4, 5, 99])
    def test_reads_after_a_revision(self, store: Store, after: int) -> None:
        """It returns newer events only, and nothing beyond the end."""
        store.append(facts(1, 5))
        assert [revision for revision, _ in store.read(after)] == list(range(after + 1, 6))

    def test_reads_more_than_a_page(self, store: Store) -> None:
        """It returns all events, however many."""
        store.append(facts(1, 1777))
        assert [event.at for _, event in store.read(10)] == [float(number) for number in range(11, 1778)]

    def test_a_batch_is_all_or_nothing(self, store: Store) -> None:
        """If one event cannot be written, none of its batch is; the store stays usable."""
        store.append(facts(1, 1))
        bad = JobReported(2.0, "j", SaturatingGoodput())
        with pytest.raises(InvalidInput):
            store.append([*facts(2, 2), bad, *facts(4, 2)])
        assert store.revision == 1
        assert store.append(facts(2, 1)) == 2
        assert [event for _, event in store.read()] == facts(1, 2)

    def test_what_is_appended_while_reading_is_not_read(self, store: Store) -> None:
        """A reader ends even while a writer goes on."""
        store.append(facts(1, 3))
        seen = []
        for revision, _ in store.read():
            seen.append(revision)
            store.append(facts(store.revision + 1, 2))
        assert seen == [1, 2, 3]
        assert store.revision == 9

    def test_another_thread_reads_while_this_one_writes(self, store: Store) -> None:
        """Every read gives the beginning of the log, in whole batches."""
        store.append(facts(1, 10))
        lengths: list[list[int]] = []
        stop = threading.Event()

        def read() -> None:
            while not stop.is_set() and len(lengths) < 20:
                lengths.append([revision for revision, _ in store.read()])

        reader = threading.Thread(target=read)
        reader.start()
        for _ in range(30):
            store.append(facts(store.revision + 1, 10))
        stop.set()
        reader.join(PATIENCE_SECONDS)
        assert not reader.is_alive()
        assert lengths
        for revisions in lengths:
            assert revisions == list(range(1, len(revisions) + 1))
            assert len(revisions) % 10 == 0

    def test_threads_append_in_turn(self, store: Store) -> None:
        """No revision is given twice, no batch is torn."""
        writers = [threading.Thread(target=lambda: [store.append(facts(1, 5)) for _ in range(10)]) for _ in range(4)]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join(PATIENCE_SECONDS)
        revisions, times = zip(*((revision, event.at) for revision, event in store.read()), strict=True)
        assert revisions == tuple(range(1, 201))
        assert times == (1.0, 2.0, 3.0, 4.0, 5.0) * 40

    def test_gives_the_newest_snapshot(self, store: Store) -> None:
        """It is plain values, whatever was saved before."""
        store.append(facts(1, 5))
        for revision in (2, 3, 5):
            store.save(SavedState(revision, {"jobs": [revision, 0.1, None, "é"]}))
        assert store.load() == SavedState(5, {"jobs": [5, 0.1, None, "é"]})
        assert store.revision == 5

    def test_a_snapshot_can_be_saved_again(self, store: Store) -> None:
        """The last snapshot of a revision counts."""
        store.append(facts(1, 2))
        store.save(SavedState(2, {"n": 1}))
        store.save(SavedState(2, {"n": 2}))
        assert store.load() == SavedState(2, {"n": 2})

    def test_a_snapshot_is_a_copy(self, store: Store) -> None:
        """Later changes of the state are not in it."""
        store.append(facts(1, 1))
        state = {"jobs": ["a"]}
        store.save(SavedState(1, state))
        state["jobs"].append("b")
        loaded = store.load()
        assert loaded is not None
        assert loaded.state == {"jobs": ["a"]}

    def test_a_snapshot_of_the_future_is_refused(self, store: Store) -> None:
        """A snapshot of a later revision would hide events that are still to be written."""
        store.append(facts(1, 2))
        with pytest.raises(InvalidInput, match="revision 3 does not fit a log that ends at 2"):
            store.save(SavedState(3, {}))
        assert store.load() is None

    @pytest.mark.parametrize("state", [{"at": math.nan}, {"at": math.inf}, {"at": object()}, {"at": {1, 2}}])
    def test_a_state_that_is_not_plain_is_refused(self, store: Store, state: dict[str, Any]) -> None:
        """Nothing of it is kept."""
        store.append(facts(1, 1))
        with pytest.raises(InvalidInput, match="state cannot be stored as JSON"):
            store.save(SavedState(1, state))
        assert store.load() is None

    def test_an_empty_store_may_begin_with_a_state(self, store: Store) -> None:
        """The state is from a log trimmed elsewhere; revisions go on from there."""
        store.save(SavedState(40, {"n": 1}))
        assert store.revision == 40
        assert store.append(facts(1, 1)) == 41
        assert [revision for revision, _ in store.read(40)] == [41]
        assert store.load() == SavedState(40, {"n": 1})

    def test_trims_only_what_the_older_snapshot_covers(self, store: Store) -> None:
        """Facts after the older snapshot stay, so that the state can be restored if the newest one is damaged."""
        store.append(facts(1, 9))
        assert store.trim(math.inf) == 0
        store.save(SavedState(6, {}))
        assert store.trim(math.inf) == 0
        store.save(SavedState(8, {}))
        assert store.trim(math.inf) == 6
        assert [revision for revision, _ in store.read()] == [7, 8, 9]
        assert store.revision == 9
        assert store.append(facts(10, 1)) == 10

    def test_trims_only_what_is_old(self, store: Store) -> None:
        """It stops at the first newer event, so that the rest has no gaps."""
        store.append([JobPaused(at, "j") for at in (1.0, 2.0, 30.0, 4.0, 50.0)])
        store.save(SavedState(4, {}))
        store.save(SavedState(5, {}))
        assert store.trim(20.0) == 2
        assert [revision for revision, _ in store.read()] == [3, 4, 5]
        assert store.trim(20.0) == 0

    def test_settings_are_kept(self, store: Store) -> None:
        """They are kept beside the log; a new value replaces the old."""
        store.set_setting("secret", "a b\nc é")
        store.set_setting("secret", "two")
        store.set_setting("other", "")
        assert (store.setting("secret"), store.setting("other"), store.setting("none")) == ("two", "", None)
        assert store.revision == 0

    def test_can_be_closed_twice(self, store: Store) -> None:
        """The second call does nothing."""
        store.close()
        store.close()


class DurableStoreConformance(StoreConformance):
    """What a store that outlives its process must also do: the fixture `reopen` closes it and opens it again."""

    @pytest.fixture
    def reopen(self) -> Callable[[Store], Store]:
        """A function that closes a store and opens it again as a new process would."""
        raise pytest.UsageError(f"{type(self).__name__} needs a fixture 'reopen' that closes and opens a store")

    def test_everything_is_there_again(self, store: Store, reopen: Callable[[Store], Store]) -> None:
        """Events, snapshots, settings and the count."""
        store.append(_several_kinds())
        store.save(SavedState(3, {"n": 3}))
        store.save(SavedState(4, {"n": 4}))
        store.set_setting("secret", "s")
        again = reopen(store)
        assert again.revision == 5
        assert [event for _, event in again.read()] == _several_kinds()
        assert again.load() == SavedState(4, {"n": 4})
        assert again.setting("secret") == "s"
        assert again.append(facts(6, 1)) == 6

    def test_revisions_go_on_after_all_was_trimmed(self, store: Store, reopen: Callable[[Store], Store]) -> None:
        """A number is never given twice."""
        store.append(facts(1, 3))
        store.save(SavedState(3, {"n": 1}))
        store.append(facts(4, 1))
        store.save(SavedState(4, {"n": 2}))
        assert store.trim(math.inf) == 3
        again = reopen(store)
        assert again.revision == 4
        assert again.append(facts(5, 1)) == 5


def _row(job_id: str, at: float, kind: str = "report", **values: Any) -> TelemetryRow:
    return TelemetryRow(job_id, at, kind, values or {"at": at})


class TelemetryConformance:
    """Measurements over time, as `pollux.store.Telemetry` promises them."""

    @pytest.fixture
    def telemetry(self) -> Telemetry:
        """Empty telemetry; this fixture also closes it."""
        raise pytest.UsageError(f"{type(self).__name__} needs a fixture 'telemetry' that gives an empty one")

    def test_is_empty_at_first(self, telemetry: Telemetry) -> None:
        """It has no rows at first, and recording no rows changes nothing."""
        telemetry.record([])
        assert dict(telemetry.latest("report")) == {}
        assert telemetry.series("a", "report") == []
        telemetry.forget("a")

    def test_keeps_jobs_and_kinds_apart(self, telemetry: Telemetry) -> None:
        """A series has only its own rows."""
        rows = [_row("a", 1.0), _row("b", 2.0), _row("a", 3.0, "eta"), _row("a", 4.0)]
        telemetry.record(rows)
        assert telemetry.series("a", "report") == [rows[0], rows[3]]
        assert telemetry.series("a", "eta") == [rows[2]]
        assert dict(telemetry.latest("report")) == {"a": rows[3], "b": rows[1]}

    def test_values_come_back_whole(self, telemetry: Telemetry) -> None:
        """They may be nested, with any text."""
        values = {"noise": {"scale": 1e300, "high": None}, "metrics": {"é ": [1, 2.5, True]}}
        telemetry.record([TelemetryRow("a", 1.0, "report", values)])
        assert telemetry.latest("report")["a"].values == values

    def test_values_that_are_not_plain_are_refused(self, telemetry: Telemetry) -> None:
        """The whole batch is refused."""
        with pytest.raises(InvalidInput, match="telemetry of 'b' cannot be stored"):
            telemetry.record([_row("a", 1.0), _row("b", 1.0, loss=math.nan)])
        assert dict(telemetry.latest("report")) == {}

    def test_the_newest_counts_though_it_came_first(self, telemetry: Telemetry) -> None:
        """Reports may overtake each other."""
        telemetry.record([_row("a", 9.0), _row("a", 5.0)])
        assert telemetry.latest("report")["a"].at == 9.0
        assert [row.at for row in telemetry.series("a", "report")] == [5.0, 9.0]

    def test_a_series_can_begin_later(self, telemetry: Telemetry) -> None:
        """It begins at a given time, included."""
        telemetry.record([_row("a", float(at)) for at in range(10)])
        assert [row.at for row in telemetry.series("a", "report", since=7.0)] == [7.0, 8.0, 9.0]

    def test_a_series_is_evenly_thinned(self, telemetry: Telemetry) -> None:
        """The first and the last stay."""
        telemetry.record([_row("a", float(at)) for at in range(41)])
        assert [row.at for row in telemetry.series("a", "report", limit=5)] == [0.0, 10.0, 20.0, 30.0, 40.0]
        assert [row.at for row in telemetry.series("a", "report", limit=1)] == [40.0]
        assert telemetry.series("a", "report", limit=0) == []

    def test_old_rows_are_thinned_and_the_newest_stays(self, telemetry: Telemetry) -> None:
        """Two days of a report every ten seconds: dense at the end, an hour apart at the beginning."""
        times = [10.0 * number for number in range(17_280)]
        for start in range(0, len(times), 500):
            telemetry.record([_row("a", at) for at in times[start : start + 500]])
        rows = telemetry.series("a", "report", limit=10**6)
        kept = [row.at for row in rows]
        assert len(kept) < 700
        assert kept[-1] == telemetry.latest("report")["a"].at == times[-1]
        assert kept == sorted(kept)
        gaps = [late - early for early, late in itertools.pairwise(kept)]
        assert max(gaps) <= 3600.0
        recent = [gap for gap, at in zip(gaps, kept, strict=False) if at > times[-1] - 3000]
        assert max(recent) <= 30.0

    def test_a_flood_is_bounded(self, telemetry: Telemetry) -> None:
        """This holds however often and long a job reports."""
        for start in range(0, 40_000, 2000):
            telemetry.record([_row("a", 0.01 * number) for number in range(start, start + 2000)])
        telemetry.record([_row("b", 3600.0 * number) for number in range(9000)])
        assert len(telemetry.series("a", "report", limit=10**6)) < 200
        assert len(telemetry.series("b", "report", limit=10**6)) <= 2100

    def test_forgets_a_job(self, telemetry: Telemetry) -> None:
        """`forget` removes all measurements of the job, and none of other jobs."""
        telemetry.record([_row("a", 1.0), _row("a", 1.0, "eta"), _row("b", 1.0)])
        telemetry.forget("a")
        assert list(telemetry.latest("report")) == ["b"]
        assert telemetry.series("a", "eta") == []
        assert len(telemetry.series("b", "report")) == 1

    def test_several_threads_may_use_it(self, telemetry: Telemetry) -> None:
        """No row is lost."""

        def work(name: str) -> None:
            for at in range(30):
                telemetry.record([_row(name, float(at))])
                assert telemetry.latest("report")[name].at == at

        threads = [threading.Thread(target=work, args=(f"j{number}",)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_SECONDS)
        assert {job_id: row.at for job_id, row in telemetry.latest("report").items()} == {
            f"j{number}": 29.0 for number in range(4)
        }
        assert all(len(telemetry.series(f"j{number}", "report")) == 30 for number in range(4))


class DurableTelemetryConformance(TelemetryConformance):
    """What telemetry that outlives its process must also do: the fixture `reopen` closes it and opens it again."""

    @pytest.fixture
    def reopen(self) -> Callable[[Telemetry], Telemetry]:
        """A function that closes it and opens it again as a new process would."""
        raise pytest.UsageError(f"{type(self).__name__} needs a fixture 'reopen' that closes and opens it")

    def test_everything_is_there_again(self, telemetry: Telemetry, reopen: Callable[[Telemetry], Telemetry]) -> None:
        """Series and the newest rows."""
        rows = [_row("a", float(at), values=json.dumps(at)) for at in range(5)]
        telemetry.record(rows)
        again = reopen(telemetry)
        assert again.series("a", "report") == rows
        assert again.latest("report")["a"] == rows[-1]
