"""A history goes out and comes in again whole; one that is not whole is refused by its line."""

import json
import math

import pytest

from pollux.controller import Controller, JobPaused, JobReported, JobSpec, JobSubmitted, NodeAdded
from pollux.controller.codec.events import encode
from pollux.core import Cluster, InvalidInput, Node
from pollux.core.errors import Conflict
from pollux.store import SavedState, TelemetryRow, open_store, open_telemetry
from pollux.store.history import export, import_into, parse
from pollux.testing import goodput_model

EVENTS = [
    NodeAdded(0.0, Node("n0", 4)),
    JobSubmitted(1.0, JobSpec("a")),
    JobReported(2.0, "a", goodput_model(), 100.0),
    JobPaused(3.0, "a"),
]
ROWS = [
    TelemetryRow("a", 2.0, "report", {"progress": 1.5}),
    TelemetryRow("a", 4.0, "report", {"progress": 2.5, "loss": None}),
    TelemetryRow("b", 4.0, "report", {}),
    TelemetryRow("a", 3.0, "eta", {"low": 1.0}),
]


def facts(first, count):
    return [JobSubmitted(float(number), JobSpec(f"job-{number}")) for number in range(first, first + count)]


def state_after(count):
    controller = Controller(Cluster(()))
    for event in facts(1, count):
        controller.apply(event)
    return SavedState(count, json.loads(json.dumps(controller.state())))


@pytest.fixture
def store():
    return open_store(None)


@pytest.fixture
def telemetry():
    return open_telemetry(None)


@pytest.fixture
def lines(store, telemetry):
    store.append(EVENTS)
    telemetry.record(ROWS)
    return list(export(store, telemetry))


def test_a_line_is_one_json_object(lines):
    values = [json.loads(line) for line in lines]
    assert all(line.endswith(b"\n") and line.count(b"\n") == 1 for line in lines)
    assert values[0] == {"format": "pollux-history", "version": 1, "revision": 4}
    assert [value["revision"] for value in values[1:5]] == [1, 2, 3, 4]
    assert values[2]["fact"]["type"] == "job-submitted"
    assert values[5] == {"telemetry": {"job_id": "a", "at": 2.0, "kind": "report", "values": {"progress": 1.5}}}
    assert values[-1] == {"end": {"facts": 4, "telemetry": 4}}


@pytest.mark.parametrize("backing", [None, "sqlite"])
def test_what_goes_out_comes_in(lines, tmp_path, backing):
    store = open_store(tmp_path / "s.sqlite" if backing else None)
    telemetry = open_telemetry(tmp_path / "t.sqlite" if backing else None)
    assert import_into(iter(lines), store, telemetry) == 4
    assert [event for _, event in store.read()] == EVENTS
    assert telemetry.series("a", "report") == ROWS[:2]
    assert telemetry.latest("report")["b"] == ROWS[2]
    assert list(export(store, telemetry)) == lines
    store.close()
    telemetry.close()


def test_lines_may_be_text_and_telemetry_may_be_left_out(lines):
    store = open_store(None)
    assert import_into([line.decode() for line in lines], store) == 4
    assert [json.loads(line) for line in export(store)][-1] == {"end": {"facts": 4, "telemetry": 0}}


def test_an_empty_store_has_an_empty_history(store):
    other = open_store(None)
    assert import_into(export(store), other) == 0
    assert other.revision == 0


def test_only_an_empty_store_takes_a_history(lines, store):
    with pytest.raises(Conflict, match="has 4 facts already; import into an empty one"):
        import_into(lines, store)


def test_what_comes_while_it_is_written_out_is_not_in_it(store):
    store.append(facts(1, 5))
    lines = export(store)
    written = [next(lines), next(lines)]
    store.append(facts(6, 5))
    written += lines
    assert parse(written).facts == tuple(enumerate(facts(1, 5), start=1))


def trimmed(facts_after):
    store = open_store(None)
    store.append(facts(1, 6))
    store.save(state_after(4))
    store.save(state_after(6))
    assert store.trim(math.inf) == 4
    store.append(facts(7, facts_after))
    return store


@pytest.mark.parametrize("facts_after", [0, 2])
def test_a_trimmed_log_brings_its_state(facts_after):
    before = trimmed(facts_after)
    contents = parse(export(before))
    assert contents.saved == state_after(6)
    assert [revision for revision, _ in contents.facts] == list(range(5, 7 + facts_after))
    again = open_store(None)
    assert import_into(export(before), again) == before.revision
    assert again.load() == state_after(6)
    assert list(again.read(6)) == list(before.read(6))


def test_a_state_alone_is_a_history():
    first, second = open_store(None), open_store(None)
    first.save(state_after(9))
    assert import_into(export(first), second) == 9
    assert second.load() == state_after(9)


def cut(line_number, replacement=None):
    def change(lines):
        new = [] if replacement is None else [replacement.encode()]
        return [*lines[:line_number], *new, *lines[line_number + 1 :]]

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda lines: [], "ends after line 0"),
        (lambda lines: lines[:-1], "ends after line 9, before its last line; export it again"),
        (lambda lines: [*lines, lines[-2]], "line 11: comes after the end"),
        (cut(0), "line 1: is not the header"),
        (cut(0, '{"format": "pollux-history", "version": 2}'), "line 1: has version 2.*upgrade"),
        (cut(0, '{"format": "pollux-history", "version": "1"}'), "version is '1'"),
        (cut(0, "[]"), "line 1: is list"),
        (cut(1), "line 2: the first fact has revision 2, and no state"),
        (cut(2), "line 3: revision is 3 after 1"),
        (cut(4), r"line 9: the end says .*lines are missing"),
        (cut(6), r"line 9: the end says .*lines are missing"),
        (cut(3, '{"revision": 3, "fact": {"type": "job-flew", "v": 1}}'), "line 4: .*job-flew.*upgrade"),
        (cut(3, '{"revision": 3, "fact": {"type": "job-paused", "v": 1}}'), "line 4: job-paused: at is missing"),
        (cut(3, '{"revision": true, "fact": {}}'), "line 4: revision is True"),
        (cut(3, '{"revision": 3, "state": {}}'), "line 4: a state must come once, before the first fact"),
        (cut(1, '{"revision": 3, "state": []}'), "line 2: state must be"),
        (cut(3, '{"revsion": 3}'), "line 4: has revsion; give fact"),
        (cut(3, "{"), "line 4: is not JSON"),
        (cut(5, '{"telemetry": {"job_id": "a"}}'), "line 6: telemetry must be an object with job_id"),
        (cut(5, '{"telemetry": {"job_id": "a", "at": "x", "kind": "k", "values": {}}}'), "line 6: .*a number as at"),
        (cut(1, '{"revision": 1, "state": {}}'), "line 10: the end says"),
        (lambda lines: [*lines[:1], b'{"revision": 1, "state": {}}', *lines[1:]], "state of revision 1 cannot be read"),
        (cut(2, json.dumps({"revision": 2, "fact": encode(JobPaused(1.0, "z"))})), "fact 2 cannot follow .*job 'z'"),
    ],
)  # fmt: skip
def test_a_history_that_is_not_whole_is_refused_and_nothing_is_written(lines, change, words):
    store, telemetry = open_store(None), open_telemetry(None)
    with pytest.raises(InvalidInput, match=words):
        import_into(change(lines), store, telemetry)
    assert store.revision == 0
    assert store.load() is None
    assert dict(telemetry.latest("report")) == {}


def test_bytes_that_are_no_text_are_refused():
    with pytest.raises(InvalidInput, match="line 1: is not JSON"):
        parse([b"\xff\xfe{}"])
