"""The strict codec: what goes through comes back the same, and all else is refused with its path."""

import json
import math
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.core.errors import InvalidInput, PolluxError, TooLarge
from pollux.wire.codec import MAX_BODY_BYTES, decode, decode_json, encode, encode_json
from pollux.wire.job import JobRequest
from pollux.wire.report import ModelReport, NoiseReport, PlaceCorrection, Report, ReportReply
from pollux.wire.status import Eta, JobStatus, NodeStatus, Plan, QueueStatus, ReasonStatus, ServiceStatus

KINDS = [
    *(JobRequest, ModelReport, NoiseReport, PlaceCorrection, Report, ReportReply),
    *(Eta, JobStatus, NodeStatus, Plan, QueueStatus, ReasonStatus, ServiceStatus),
]
MODEL = ModelReport((1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0), "h100", 128, 4096, 512, 0.5, 2.0)
NOISE = NoiseReport(100.0, 90.0, None, 7)
REPORT = Report(2, 10, 1280, 1100.5, 0.3, 4, 1, 128, 32, 1, noise=NOISE, model=MODEL, metrics={"accuracy": 0.5})

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def of(kind: Any) -> st.SearchStrategy[Any]:
    """Every value of a field's type that the wire takes."""
    text = st.text(st.characters(codec="utf-8"), max_size=12)
    numbers = st.floats(allow_nan=False, allow_infinity=False)
    scalars: dict[Any, st.SearchStrategy[Any]] = {
        str: text,
        int: st.integers(-(2**63) + 1, 2**63 - 1),
        float: numbers,
        bool: st.booleans(),
        type(None): st.none(),
    }
    if kind in scalars:
        return scalars[kind]
    if hasattr(kind, "__dataclass_fields__"):
        hints = typing.get_type_hints(kind)
        return st.builds(kind, **{each.name: of(hints[each.name]) for each in fields(kind)})
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is tuple:
        return st.lists(of(arguments[0]), max_size=3).map(tuple)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return st.dictionaries(text, of(arguments[1]), max_size=3)
    return st.one_of(*(of(each) for each in arguments))


def refused(kind: type, value: object, where: str = "") -> str:
    with pytest.raises(InvalidInput) as caught:
        decode(kind, value, where)
    return str(caught.value)


def complaint(work: Callable[[], object]) -> str | None:
    """The message of the error, which must be one of ours; None where there is none."""
    try:
        work()
    except PolluxError as error:
        return str(error)
    return None


def wrong_for(kind: Any) -> list[object]:
    """JSON values that are of none of the types a field has."""
    kinds = set(typing.get_args(kind)) if type(None) in typing.get_args(kind) else {kind}
    wrong: list[object] = [math.nan, math.inf, object(), 10**400]
    if str not in kinds and not any(typing.get_origin(each) is Literal for each in kinds):
        wrong.append("x")
    if float not in kinds and int not in kinds:
        wrong.append(1)
    if float not in kinds:
        wrong.append(1.5)
    if bool not in kinds:
        wrong.append(True)
    if type(None) not in kinds:
        wrong.append(None)
    return [*wrong, "\ud800", "x" * 70_000]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_every_value_comes_back_the_same(kind, data):
    value = data.draw(of(kind))
    assert decode(kind, encode(value)) == value
    assert decode(kind, decode_json(encode_json(value))) == value
    assert encode(value) == json.loads(encode_json(value))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@given(value=JSON_VALUES)
def test_random_json_is_taken_or_refused(kind, value):
    message = complaint(lambda: decode(kind, value))
    assert message is None or 0 < len(message) < 1500


@pytest.mark.parametrize(
    ("kind", "name"),
    [pytest.param(kind, each.name, id=f"{kind.__name__}.{each.name}") for kind in KINDS for each in fields(kind)],
)
def test_every_field_refuses_every_other_type_by_name(kind, name):
    value = encode(EXAMPLES[kind])
    for wrong in wrong_for(typing.get_type_hints(kind)[name]):
        assert refused(kind, value | {name: wrong}).startswith(name)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_missing_field_is_named(kind):
    value = encode(EXAMPLES[kind])
    for each in fields(kind):
        rest = {name: item for name, item in value.items() if name != each.name}
        if each.default is MISSING and each.default_factory is MISSING:
            assert refused(kind, rest) == f"{each.name} is missing: give it"
        else:
            decode(kind, rest)


EXAMPLES: dict[Any, Any] = {
    JobRequest: JobRequest("a", ("true",)),
    ModelReport: MODEL,
    NoiseReport: NOISE,
    PlaceCorrection: PlaceCorrection(1, 4, 0.25),
    Report: REPORT,
    ReportReply: ReportReply(),
    Eta: Eta(1.0, 2.0),
    JobStatus: JobStatus("a", "a", "queued", "default", "normal", 1.0, 1, 4),
    NodeStatus: NodeStatus("n", 4, "cpu", 0),
    Plan: Plan("a", True, 1, 1, 4),
    QueueStatus: QueueStatus("default"),
    ReasonStatus: ReasonStatus("grown", 1.0),
    ServiceStatus: ServiceStatus("0", "pollux", "rounds", "local", 1.0, 2.0, 3),
}


def test_nothing_is_dropped():
    encoded = encode(REPORT)
    assert encoded["loss"] is None
    assert encoded["noise"] == {"scale": 100.0, "low": 90.0, "high": None, "measured": 7}
    assert encoded["model"]["parameters"] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert set(encoded) == {each.name for each in fields(Report)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": True}, "step is true: give a whole number"),
        ({"step": 1.0}, "step is 1.0: give a whole number"),
        ({"step": 2**63}, "step is a number of 64 bits: give a whole number below 2^63"),
        ({"progress": math.nan}, "progress is nan: give a finite number"),
        ({"progress": 10**400}, "progress is a number of 1329 bits: give a finite number"),
        ({"progress": None}, "progress is null: give a number"),
        ({"metrics": {"a": "b"}}, "metrics.a is 'b': give a number"),
        ({"metrics": {3: 1.0}}, "metrics has the key 3: give strings as keys"),
        ({"metrics": [1]}, "metrics is a list: give a mapping"),
        ({"noise": {"scale": 1.0}}, "noise.low is missing: give it"),
        ({"noise": 3}, "noise is 3: give a mapping"),
        ({"final": 1}, "final is 1: give true or false"),
        ({"model": encode(MODEL) | {"parameters": [1.0, 2, "x"]}}, "model.parameters[2] is 'x': give a number"),
        (
            {"model": encode(MODEL) | {"parameters": [0.0] * 10_001}},
            "model.parameters has 10001 items: give at most 10000",
        ),
        ({"model": encode(MODEL) | {"gpu_type": "x" * 65_537}}, "give at most 65536 characters, these are 65537"),
        ({"model": encode(MODEL) | {"gpu_type": "\ud800"}}, "give text that can be written as UTF-8"),
    ],
)
def test_refusals_name_path_value_and_remedy(change, message):
    assert message in refused(Report, encode(REPORT) | change)
    assert refused(Report, encode(REPORT) | change, "report of job-1").startswith("report of job-1: ")


def test_whole_numbers_are_taken_for_floats():
    report = decode(Report, encode(REPORT) | {"progress": 3})
    assert report.progress == 3.0
    assert isinstance(report.progress, float)


def test_an_unknown_field_suggests_the_closest():
    message = refused(Report, encode(REPORT) | {"trhoughput": 1.0})
    assert message.startswith("trhoughput is not known: did you mean 'throughput'?")
    assert refused(Report, {3: 1}).startswith("3 is not known")


def test_what_is_no_mapping_is_refused():
    assert refused(Report, [1]) == "the value is a list: give a mapping"
    assert refused(Report, [1], "report") == "report is a list: give a mapping"


def test_a_literal_takes_its_own_words_only():
    value = encode(EXAMPLES[JobRequest])
    assert "priority is 'hihg': did you mean 'high'? known: high, low, normal" in refused(
        JobRequest, value | {"priority": "hihg"}
    )


@dataclass(frozen=True)
class Anything:
    value: Any
    either: int | str | Eta | None = None
    items: list[int] = field(default_factory=list)


def test_fields_of_any_type_are_bounded():
    deep: Any = 1
    for _ in range(50):
        deep = [deep]
    assert "is nested too deeply: give at most 20 levels" in refused(Anything, {"value": deep})
    assert "is nested too deeply" in refused(Anything, {"value": {"a": deep}})
    assert decode(Anything, {"value": {"a": [1, None]}}).value == {"a": [1, None]}
    with pytest.raises(InvalidInput, match="nested too deeply"):
        encode(deep)


def test_unions_take_the_first_that_fits_and_refuse_by_the_closest():
    assert decode(Anything, {"value": 1, "either": "x"}).either == "x"
    assert decode(Anything, {"value": 1, "either": None}).either is None
    assert decode(Anything, {"value": 1, "either": {"low": 1, "high": 2}}).either == Eta(1.0, 2.0)
    assert refused(Anything, {"value": 1, "either": {"low": 1, "high": "x"}}) == "either.high is 'x': give a number"
    assert decode(Anything, {"value": 1, "items": [1, 2]}).items == [1, 2]


@pytest.mark.parametrize("value", [object(), {1, 2}, math.inf, b"x", {"a": math.nan}, {1: 2}, "\ud800", 2**64])
def test_what_json_cannot_hold_is_not_encoded(value):
    with pytest.raises(InvalidInput):
        encode({"inner": value})


def test_length_is_limited_on_the_way_in_only():
    long = {"text": "x" * 70_000, "items": list(range(10_001))}
    assert encode(long) == long
    for key, value in long.items():
        assert refused(Anything, {"value": {key: value}}).startswith(f"value.{key} ")


def test_encode_names_the_field():
    with pytest.raises(InvalidInput, match=r"^eta\.high is inf: give a finite number$"):
        encode(Plan("a", True, 1, 1, 4, eta=Eta(1.0, math.inf)))


def test_a_type_without_a_rule_is_our_mistake():
    @dataclass
    class Odd:
        value: set[int]

    with pytest.raises(TypeError, match="no rule"):
        decode(Odd, {"value": []})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{", "body is not JSON at line 1 column 2"),
        (b"", "body is not JSON at line 1 column 1"),
        (b"\xff", "body has byte 0 that is not UTF-8"),
        (b'{"a": 1, "a": 2}', "body has the key 'a' twice"),
        (b'{"a": NaN}', "body holds NaN"),
        (b'{"a": -Infinity}', "body holds -Infinity"),
        pytest.param(b"[" * 500_000, "body is nested too deeply", id="deep"),
        pytest.param(b"9" * 5_000, "body has a number that is too long", id="many digits"),
    ],
)
def test_bad_json_is_refused(text, message):
    with pytest.raises(InvalidInput, match=message.replace("[", r"\[")):
        decode_json(text, "body")


def test_too_much_json_is_refused_with_its_own_code():
    with pytest.raises(TooLarge) as caught:
        decode_json(b" " * (MAX_BODY_BYTES + 1))
    assert caught.value.http_status == 413


@given(st.binary(max_size=60))
def test_random_bytes_are_taken_or_refused(text):
    message = complaint(lambda: decode_json(text))
    assert message is None or message.startswith("the body ")
