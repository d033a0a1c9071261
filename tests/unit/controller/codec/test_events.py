"""Every event comes back from plain JSON as it was; shapes from elsewhere are refused by name."""

import contextlib
import json
import math
from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.controller import (
    Controller,
    ControllerSettings,
    DecisionMade,
    Event,
    JobCancelled,
    JobFinished,
    JobLimitsChanged,
    JobPaused,
    JobReported,
    JobResumed,
    JobRunning,
    JobSpec,
    JobSubmitted,
    NodeAdded,
    NodeRemoved,
    QueueChanged,
)
from pollux.controller.codec import events as event_codec
from pollux.controller.codec.events import decode, decode_value, encode, encode_model, encode_value
from pollux.controller.messages.events import GenerationEnded, TimerFired
from pollux.core import Decision, InvalidInput, JobLimits, Node, Placement, PolluxError, Queue, Reason
from pollux.core.errors import StoreFailed
from pollux.goodput import BatchLimits, Efficiency, FabricThroughput, GoodputModel, PublishedThroughput
from pollux.policies import create
from pollux.testing import FakeDriver, FakeOracle, FakeWork, SaturatingGoodput, cluster, goodput_model
from pollux.testing.strategies import job_limits, nodes, queues
from pollux.wire.job import BatchSizes, CheckpointRequest, JobRequest, Resources

seconds = st.floats(0.0, 1e9, allow_nan=False)
names = st.text("abcé-._0", min_size=1, max_size=8)
counts = st.integers(0, 1000)


def throughputs() -> st.SearchStrategy[PublishedThroughput | FabricThroughput]:
    times = st.lists(st.floats(1e-9, 10.0), min_size=6, max_size=6)
    gammas = st.floats(1.0, 10.0)
    return st.one_of(
        st.builds(lambda numbers, gamma: PublishedThroughput(*numbers, gamma), times, gammas),
        st.builds(
            lambda numbers, gamma, word: FabricThroughput(*numbers, gamma, algorithm=word),
            times,
            gammas,
            st.sampled_from(["ring", "tree"]),
        ),
    )


@st.composite
def models(draw: st.DrawFn) -> GoodputModel:
    initial = draw(st.integers(1, 512))
    efficiency = Efficiency(initial, draw(st.floats(0.0, 1e6)), draw(st.floats(1e-6, 1e6)))
    limits = BatchLimits(initial, initial * draw(st.integers(1, 64)), 1, initial, accumulation=draw(st.booleans()))
    by_type = draw(st.dictionaries(st.sampled_from(["a100", "t4"]), throughputs()))
    return GoodputModel(draw(throughputs()), efficiency, limits, by_type)


@st.composite
def requests(draw: st.DrawFn) -> JobRequest:
    low = draw(st.integers(1, 8))
    return JobRequest(
        name=draw(names),
        run=tuple(draw(st.lists(names, min_size=1, max_size=3))),
        min_gpus=low,
        max_gpus=low + draw(st.integers(0, 8)),
        batch_size=draw(st.sampled_from([BatchSizes(), BatchSizes(32, 1024, 64)])),
        resources=draw(st.sampled_from([Resources(), Resources(2.0, 2.0**34, ("a100", "t4"))])),
        env=draw(st.dictionaries(names, names, max_size=2)),
        priority=draw(st.sampled_from(["low", "normal", "high"])),
        preemptible=draw(st.sampled_from([None, True, False])),
        after=tuple(draw(st.lists(names, max_size=2))),
        time_limit_seconds=draw(st.none() | seconds),
        on_resize=draw(st.sampled_from([None, "live", "restart", "never"])),
        checkpoint=draw(st.sampled_from([CheckpointRequest(), CheckpointRequest("c", 60.0, 2)])),
    )


def specs() -> st.SearchStrategy[JobSpec]:
    return st.builds(
        JobSpec,
        id=names,
        limits=job_limits(),
        requested_gpus=st.integers(1, 64),
        weight=st.floats(0.1, 10.0),
        queue=names,
        oracle=st.sampled_from([None, FakeOracle()]),
        retries=counts,
        after=st.lists(names, max_size=2).map(tuple),
        time_limit_seconds=st.none() | seconds,
        request=st.none() | requests(),
    )


@st.composite
def decisions(draw: st.DrawFn) -> Decision:
    placements = st.dictionaries(st.sampled_from(["n0", "n1", "n2"]), st.integers(1, 8), max_size=3).map(Placement.of)
    reasons = st.builds(Reason, names, st.dictionaries(names, st.floats(allow_nan=False), max_size=2))
    return Decision(
        draw(st.dictionaries(names, placements, max_size=3)),
        draw(st.none() | counts),
        draw(st.dictionaries(names, reasons, max_size=2)),
        memory=object(),
    )


def events() -> st.SearchStrategy[Event]:
    outcomes = st.sampled_from(["succeeded", "crashed", "out-of-memory", "stopped", "lost"])
    each_queue = st.builds(Queue, names, st.floats(0.1, 10.0), st.none() | counts)
    return st.one_of(
        st.builds(JobSubmitted, seconds, specs()),
        st.builds(JobRunning, seconds, names, counts),
        st.builds(JobReported, seconds, names, st.none() | models(), st.none() | seconds, st.none() | seconds, counts),
        st.builds(GenerationEnded, seconds, names, counts, outcomes, names),
        st.builds(TimerFired, seconds),
        st.builds(JobFinished, seconds, names, st.sampled_from(["succeeded", "failed"]), names),
        st.builds(JobCancelled, seconds, names),
        st.builds(JobPaused, seconds, names),
        st.builds(JobResumed, seconds, names),
        st.builds(JobLimitsChanged, seconds, names, job_limits()),
        st.builds(NodeAdded, seconds, nodes()),
        st.builds(NodeRemoved, seconds, names),
        st.builds(QueueChanged, seconds, each_queue),
        st.builds(DecisionMade, seconds, counts, decisions(), st.booleans()),
    )


def through_json(event: Event) -> Event:
    return decode(json.loads(json.dumps(encode(event), allow_nan=False)))


def without_unwritten(event: Event) -> Event:
    """What a log does not keep: oracles and memory."""
    if isinstance(event, JobSubmitted):
        return replace(event, spec=replace(event.spec, oracle=None))
    return event


@given(events())
def test_every_event_comes_back(event):
    again = through_json(event)
    assert type(again) is type(event)
    assert again == without_unwritten(event)
    for field in fields(event):
        # Equality leaves models out; they must come back all the same.
        if field.name == "goodput":
            assert again.goodput == event.goodput


def test_every_kind_of_event_has_a_written_form():
    assert {kind.__name__ for kind in event_codec._NAMES} == {kind.__name__ for kind in Event.__subclasses__()}
    assert encode(TimerFired(3.0)) == {"type": "timer-fired", "v": 1, "at": 3.0}


def _without_later_fields(fact):
    """Take out the fields that came later; none of them says anything."""
    spec = fact["spec"] if isinstance(fact.get("spec"), dict) else {}
    request = spec.get("request") or {}
    later = [(spec, "kind"), (spec, "group"), (spec, "deadline"), (request, "group"), (request, "kind")]
    later += [(request, "deadline")]
    later += [(limits, "shares_gpus") for limits in (spec.get("limits"), fact.get("limits")) if limits]
    later += [(fact, name) for name in ("loss", "utilization", "memory_bytes")]
    assert not any(part.pop(name, None) for part, name in later)


def test_old_events_are_written_again_byte_for_byte():
    lines = (Path(__file__).parents[3] / "fixtures/before_packages/history.ndjson").read_text().splitlines()
    facts = [json.loads(line)["fact"] for line in lines if '"fact"' in line]
    assert facts
    for fact in facts:
        again = encode(decode(fact))
        _without_later_fields(again)
        assert json.dumps(again) == json.dumps(fact)


def test_what_is_not_written():
    spec = JobSpec("a", oracle=FakeOracle())
    assert "oracle" not in encode(JobSubmitted(0.0, spec))["spec"]
    assert through_json(JobSubmitted(0.0, spec)).spec.oracle is None
    assert "memory" not in encode(DecisionMade(0.0, 1, Decision({}, memory="m")))["decision"]


def test_a_node_keeps_its_infinities():
    value = encode(NodeAdded(1.0, Node("n", 4)))
    assert value["node"]["num_cpus"] == "inf"
    assert through_json(NodeAdded(1.0, Node("n", 4))).node.memory_bytes == math.inf


@given(models(), st.integers(1, 4), st.integers(0, 12))
def test_a_model_predicts_the_same(model, num_nodes, more):
    again = decode_value(GoodputModel, json.loads(json.dumps(encode_model(model))))
    for gpu_type in ("", "a100", "t4"):
        assert again.goodput(num_nodes, num_nodes + more, gpu_type) == model.goodput(
            num_nodes, num_nodes + more, gpu_type
        )


@given(queues(), job_limits(), specs())
def test_parts_come_back_too(queue_map, limits, spec):
    assert all(decode_value(Queue, encode_value(queue)) == queue for queue in queue_map.values())
    assert decode_value(JobLimits, encode_value(limits)) == limits
    assert decode_value(JobSpec, encode_value(spec)) == replace(spec, oracle=None)


@pytest.mark.parametrize("policy", ["las", "pollux"])
@pytest.mark.parametrize("trigger", ["rounds", "events"])
def test_a_log_that_was_written_and_read_drives_a_controller_alike(policy, trigger):
    settings = ControllerSettings(trigger)
    live = Controller(cluster(4, 4), settings)
    story: list[Event] = [JobSubmitted(25.0 * i, JobSpec(f"j{i}", JobLimits(max_gpus=4))) for i in range(6)]
    story += [
        NodeAdded(130.0, Node("n2", 4)),
        JobPaused(140.0, "j1"),
        NodeRemoved(170.0, "n1"),
        JobResumed(200.0, "j1"),
    ]
    work = {f"j{i}": FakeWork(200.0 + 77.0 * i, goodput=goodput_model(noise_scale=100.0 * (i + 1))) for i in range(6)}
    log = FakeDriver(live, create(policy), story, work).run()

    again = Controller(cluster(4, 4), settings)
    commands = [(0.0, command) for command in again.start(0.0)]
    for event in log.events:
        commands += [(event.at, command) for command in again.apply(through_json(event))]
    assert commands == log.commands
    assert again.snapshot(1e6) == live.snapshot(1e6)
    for job_id, record in live.jobs.items():
        twin = again.jobs[job_id]
        assert (twin.state, twin.generation, twin.attained_gpu_seconds, twin.ended_at, twin.remaining) == (
            record.state, record.generation, record.attained_gpu_seconds, record.ended_at, record.remaining,
        )  # fmt: skip


def test_a_foreign_goodput_function_is_refused():
    with pytest.raises(InvalidInput, match="SaturatingGoodput has no written form; report a GoodputModel"):
        encode(JobReported(0.0, "a", SaturatingGoodput()))


def test_an_event_of_ones_own_is_refused():
    @dataclass(frozen=True, slots=True)
    class Mine:
        at: float

    with pytest.raises(InvalidInput, match="event Mine has no written form"):
        encode(Mine(0.0))


def test_what_is_from_the_future_says_so():
    with pytest.raises(StoreFailed, match=r"event type 'job-cloned' is unknown .* upgrade"):
        decode({"type": "job-cloned", "v": 1, "at": 0.0})
    with pytest.raises(StoreFailed, match="'job-paused' has version 9, this version of Pollux knows 1; upgrade"):
        decode({"type": "job-paused", "v": 9, "at": 0.0, "job_id": "a"})
    model = encode_model(goodput_model())
    model["throughput"] = {"kind": "quantum"}
    with pytest.raises(StoreFailed, match=r"throughput model is of the kind 'quantum'.* upgrade"):
        decode_value(GoodputModel, model)


def test_an_older_version_is_brought_up_to_date(monkeypatch):
    """As if `job_id` had been called `job` in version 1, and its reason had come with version 3."""
    monkeypatch.setattr(JobPaused, "VERSION", 3)
    monkeypatch.setitem(event_codec.UPCASTS, ("job-paused", 1), lambda body: {"at": body["at"], "name": body["job"]})
    monkeypatch.setitem(event_codec.UPCASTS, ("job-paused", 2), lambda body: {"at": body["at"], "job_id": body["name"]})
    assert decode({"type": "job-paused", "v": 1, "at": 2.0, "job": "a"}) == JobPaused(2.0, "a")
    assert decode({"type": "job-paused", "v": 2, "at": 2.0, "name": "a"}) == JobPaused(2.0, "a")
    assert decode({"type": "job-paused", "v": 3, "at": 2.0, "job_id": "a"}) == JobPaused(2.0, "a")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "an event is null: give a mapping"),
        ([], "an event is a list"),
        ({"type": "job-paused"}, "job-paused: v is null"),
        ({"type": "job-paused", "v": True}, "job-paused: v is true"),
        ({"type": "job-paused", "v": 1, "at": 0.0}, "job-paused: job_id is missing: give it"),
        ({"type": "job-paused", "v": 1, "at": "x", "job_id": "a"}, "job-paused: at is 'x': give a number"),
        ({"type": "job-paused", "v": 1, "at": True, "job_id": "a"}, "job-paused: at is true"),
        ({"type": "job-paused", "v": 1, "at": 0, "job_id": 7}, "job-paused: job_id is 7: give a string"),
        ({"type": "job-paused", "v": 1, "at": 0, "job_di": "a"}, "job_di is not known: did you mean 'job_id'"),
        ({"type": "node-added", "v": 1, "at": 0, "node": {"id": "n", "num_gpus": -1}}, "node does not fit: "),
        ({"type": "node-added", "v": 1, "at": 0, "node": {"id": "n", "num_gpus": 1.5}}, "whole number"),
        ({"type": "node-added", "v": 1, "at": 0, "node": {"id": "n", "num_gpus": 1, "preemptible": 1}}, "true or"),
        ({"type": "job-finished", "v": 1, "at": 0, "job_id": "a", "outcome": "suceeded"}, "did you mean 'succeeded'"),
        ({"type": "decision-made", "v": 1, "at": 0, "revision": 1, "decision": {"allocation": {"a": [["n"]]}}}, "of 2"),
        ({"type": "decision-made", "v": 1, "at": 0, "revision": 1, "decision": {"allocation": {"a": 3}}}, "a list"),
        ({"type": "decision-made", "v": 1, "at": 0, "revision": 1, "decision": {"allocation": []}}, "a mapping"),
        ({"type": "job-reported", "v": 1, "at": 0, "job_id": "a", "goodput": {}}, "throughput is missing"),
    ],
)  # fmt: skip
def test_a_wrong_shape_is_named(value, words):
    with pytest.raises(InvalidInput) as caught:
        decode(value)
    assert words in str(caught.value)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | names,
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3)),
       events(), st.randoms(use_true_random=False))  # fmt: skip
def test_damage_is_one_of_our_errors_or_harmless(rubbish, event, random):
    value = encode(event)
    body = value
    while True:
        key = random.choice(list(body))
        if isinstance(body[key], dict) and body[key] and random.random() < 0.8:
            body = body[key]
        else:
            body[key] = rubbish
            break
    with contextlib.suppress(PolluxError):
        assert isinstance(decode(value), Event)
