"""Durations, sizes and GPU ranges as people write them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.core.errors import InvalidInput, PolluxError
from pollux.wire.quantities import MAX_GPUS, parse_duration, parse_gpus, parse_size

ODD: list[object] = [
    None,
    True,
    math.nan,
    math.inf,
    -1,
    -0.5,
    10**400,
    [],
    {},
    [1],
    "",
    " ",
    "x",
    "-5",
    "1e3",
    "٣",
    "1..2..3",
    b"4",
]


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (90, 90.0),
        (1.5, 1.5),
        ("90", 90.0),
        ("90s", 90.0),
        ("90 sec", 90.0),
        ("10min", 600.0),
        ("10m", 600.0),
        ("24h", 86_400.0),
        ("2d", 172_800.0),
        ("1h30min", 5_400.0),
        ("1d 2h 3min 4s", 93_784.0),
        ("0.5H", 1_800.0),
        (0, 0.0),
    ],
)
def test_durations(value, seconds):
    assert parse_duration(value) == seconds


@pytest.mark.parametrize("value", [*ODD, "1y", "30min1h", "1h1h", "1h x", "h", "1:30", "4000d", [1, 2]])
def test_what_is_no_duration_is_refused(value):
    with pytest.raises(InvalidInput, match=r"^grace is "):
        parse_duration(value, "grace")


def test_a_duration_out_of_bounds_names_them():
    with pytest.raises(InvalidInput, match=r"^grace is '2h': give 0s to 1h$"):
        parse_duration("2h", "grace", high=3600.0)
    with pytest.raises(InvalidInput, match=r"^t is 0: give 1s to 3650d$"):
        parse_duration(0, "t", low=1.0)
    assert parse_duration("1h", high=3600.0) == 3600.0


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (1024, 1024.0),
        ("0", 0.0),
        ("100B", 100.0),
        ("1kB", 1e3),
        ("512MB", 512e6),
        ("1.5 GB", 1.5e9),
        ("16GiB", 16 * 2.0**30),
        ("16Gi", 16 * 2.0**30),
        ("1kib", 1024.0),
        ("2TiB", 2 * 2.0**40),
        ("1PB", 1e15),
    ],
)
def test_sizes(value, size):
    assert parse_size(value) == size


@pytest.mark.parametrize("value", [*ODD, "16G", "16iB", "16i", "GiB", "16 gigabytes", "2000PiB", "1EiB"])
def test_what_is_no_size_is_refused(value):
    with pytest.raises(InvalidInput, match=r"^memory is .*(GiB|PiB)"):
        parse_size(value, "memory")


@pytest.mark.parametrize(
    ("value", "bounds"),
    [
        (4, (4, 4)),
        ("4", (4, 4)),
        ("1..16", (1, 16)),
        (" 1 .. 16 ", (1, 16)),
        ("1:16", (1, 16)),
        ([1, 16], (1, 16)),
        ((2, 2), (2, 2)),
        (MAX_GPUS, (MAX_GPUS, MAX_GPUS)),
    ],
)
def test_gpu_ranges(value, bounds):
    assert parse_gpus(value) == bounds


@pytest.mark.parametrize(
    "value",
    [
        *ODD,
        0,
        "0",
        "0..4",
        [0, 4],
        "1..100001",
        100_001,
        4.0,
        "4.5",
        [1, 2, 3],
        [True, 4],
        ["1", "2"],
        "1..",
        "..4",
        "1...4",
    ],
)
def test_what_is_no_gpu_range_is_refused(value):
    with pytest.raises(InvalidInput, match=r"^gpus is .*: give a number such as 4, or a range such as 1\.\.16"):
        parse_gpus(value)


@pytest.mark.parametrize("value", ["16..1", [16, 1]])
def test_a_range_that_ends_below_its_start_is_turned_round(value):
    with pytest.raises(InvalidInput, match=r"gpus is '16\.\.1'.*did you mean 1\.\.16"):
        parse_gpus(value)


@given(st.integers(1, MAX_GPUS), st.integers(1, MAX_GPUS))
def test_ranges_read_as_they_are_written(first, second):
    low, high = sorted((first, second))
    assert parse_gpus(f"{low}..{high}") == (low, high)


@given(st.one_of(st.none(), st.integers(), st.floats(), st.text(max_size=20), st.lists(st.integers() | st.text())))
def test_anything_is_taken_or_refused(value):
    for parse in (parse_duration, parse_size, parse_gpus):
        try:
            parse(value)
        except PolluxError:
            continue
