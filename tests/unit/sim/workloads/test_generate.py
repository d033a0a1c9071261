"""Generated workloads: reproducible, fit for their cluster, like the published; and what traces may hold."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.core import InvalidInput
from pollux.goodput import BatchLimits, PublishedThroughput
from pollux.sim.applications.modelled import ModelledApplication, NoiseSchedule
from pollux.sim.applications.profiles import load_profiles
from pollux.sim.workloads.builtin import builtin_applications
from pollux.sim.workloads.generate import GenerateSettings, generate_workload
from pollux.sim.workloads.workload import check_applications, read_workload

HEADER = "timestamp,duration,num_gpus\n"


def application(name="toy", **changes):
    parameters = {
        "name": name,
        "throughput": PublishedThroughput(0.01, 0.001, 0.05, 0.002, 0.01, 0.001, 2.0),
        "noise": NoiseSchedule(100, 1000),
        "limits": BatchLimits(initial=64, maximum=1024, local_min=8, local_max=64),
        "epochs": 5,
        "steps_per_epoch": 1000,
    }
    return ModelledApplication(**{**parameters, **changes})


def write(path, text):
    path.write_text(text)
    return path


@pytest.fixture
def trace(tmp_path):
    """A job a minute over two days, twice as many from 12:00 to 13:00, of every size."""
    lines = []
    for minute in range(2 * 24 * 60):
        hour = minute // 60 % 24
        stamp = f"2020-05-{1 + minute // 1440:02d} {hour:02d}:{minute % 60:02d}:30"
        line = f"{stamp},{60 + minute * 7},{1 << minute % 5}\n"
        lines += [line] * (2 if hour == 12 else 1)
    return write(tmp_path / "trace.csv", HEADER + "".join(lines))


@pytest.fixture(scope="module")
def measured(osdi21_data):
    return load_profiles(osdi21_data / "profiles")


@given(
    num_jobs=st.integers(1, 60),
    hours=st.floats(0.1, 100),
    realistic=st.booleans(),
    seed=st.integers(-5, 10**9),
    nodes=st.integers(1, 20),
    gpus_per_node=st.integers(1, 8),
)
def test_any_settings_give_a_workload_that_its_cluster_can_run(**settings):
    chosen = GenerateSettings(**settings)
    known = builtin_applications()
    workload = generate_workload(known, chosen, name="some")
    check_applications(workload, known, chosen.num_gpus)
    assert workload.name == "some"
    assert len(workload.jobs) == chosen.num_jobs
    times = [job.time for job in workload.jobs]
    assert times == sorted(times)
    assert all(time == int(time) and 0 <= time < chosen.hours * 3600 for time in times)
    assert [job.name for job in workload.jobs] == [
        f"{job.application}-{index}" for index, job in enumerate(workload.jobs)
    ]


def test_a_seed_means_one_workload(trace):
    known = builtin_applications()
    for source in (None, trace):
        first = generate_workload(known, GenerateSettings(seed=7), source)
        assert generate_workload(dict(reversed(known.items())), GenerateSettings(seed=7), source) == first
        assert generate_workload(known, GenerateSettings(seed=8), source) != first


def test_load_adds_jobs_to_those_that_are_there(trace):
    def jobs(load, source):
        workload = generate_workload(builtin_applications(), GenerateSettings(load=load), source)
        return Counter((job.time, job.application, job.num_gpus, job.batch_size) for job in workload.jobs)

    for source in (None, trace):
        assert jobs(2.0, source).total() == 320
        assert jobs(0.5, source).total() == 80
        assert jobs(0.5, source) < jobs(1.0, source) < jobs(2.0, source)


def test_realistic_changes_only_what_is_asked_for(trace):
    tuned = generate_workload(builtin_applications(), GenerateSettings(), trace)
    realistic = generate_workload(builtin_applications(), GenerateSettings(realistic=True), trace)
    assert [(job.name, job.time) for job in tuned.jobs] == [(job.name, job.time) for job in realistic.jobs]
    assert [job.num_gpus for job in tuned.jobs] != [job.num_gpus for job in realistic.jobs]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_jobs": 0}, "num-jobs is 0; give a whole number, 1 or more"),
        ({"num_jobs": 2.5}, "num-jobs is 2.5"),
        ({"hours": 0.0}, "hours is 0.0; give a finite number above 0"),
        ({"hours": float("inf")}, "hours is inf"),
        ({"load": -1.0}, "load is -1.0; give a finite number above 0"),
        ({"load": float("nan")}, "load is nan"),
        ({"nodes": 0}, "nodes is 0"),
        ({"gpus_per_node": 0}, "gpus-per-node is 0"),
    ],
)
def test_bad_settings_are_refused(changes, said):
    with pytest.raises(InvalidInput, match=said):
        GenerateSettings(**changes)


def test_no_applications_are_refused():
    with pytest.raises(InvalidInput, match="no applications"):
        generate_workload({}, GenerateSettings())


def test_arrivals_peak_with_the_trace_after_two_thirds_of_the_window(trace):
    workload = generate_workload(builtin_applications(), GenerateSettings(num_jobs=600), trace)
    by_hour = Counter(int(job.time // 3600) for job in workload.jobs)
    assert set(by_hour) == set(range(8))
    assert max(by_hour, key=lambda hour: by_hour[hour]) == 5


@pytest.mark.parametrize("hours", [0.01, 1.0, 2.0, 24.0, 30.0, 100.0])
def test_windows_of_any_length_are_filled(trace, hours):
    workload = generate_workload(builtin_applications(), GenerateSettings(hours=hours), trace)
    times = [job.time / 3600 for job in workload.jobs]
    assert len(times) == 160
    assert 0 <= min(times) <= max(times) < hours
    if hours >= 1:
        assert max(later - earlier for earlier, later in pairwise([0, *times, hours])) < hours / 5


def test_a_day_repeats_beyond_a_day(trace):
    workload = generate_workload(builtin_applications(), GenerateSettings(num_jobs=6000, hours=48), trace)
    by_hour = Counter(int(job.time // 3600) for job in workload.jobs)
    peaks = sorted(sorted(by_hour, key=lambda hour: by_hour[hour])[-2:])
    assert peaks[1] - peaks[0] == 24


def test_a_small_trace_is_used_again(tmp_path):
    path = write(tmp_path / "trace.csv", HEADER + "0,600,1\n600,600,1\n1200,600,1\n")
    workload = generate_workload({"toy": application()}, GenerateSettings(num_jobs=7, hours=1), path)
    assert sorted(Counter(job.time for job in workload.jobs).values()) == [2, 2, 3]


@pytest.mark.parametrize(
    "stamps",
    [
        ("2017-10-09 07:01:55", "2017-10-10 08:30:00"),
        ("2017-10-09T07:01:55+02:00", "2017-10-10T08:30:00.5"),
        (str(7 * 3600 + 115), str(86_400 * 3 + 8.5 * 3600)),
    ],
)
def test_timestamps_are_dates_or_seconds(tmp_path, stamps):
    path = write(tmp_path / "trace.csv", HEADER + "".join(f"{stamp},600,1\n" for stamp in stamps))
    workload = generate_workload({"toy": application()}, GenerateSettings(num_jobs=2), path)
    first, second = (job.time for job in workload.jobs)
    assert second - first == 88 * 60 + 5


def test_trifles_and_giants_are_left_out(tmp_path):
    lines = ["1000,59,1", "1000,3600001,1", "1000,450001,8", "1000,600,0", "5000,60,1", "5000,3600000,1"]
    path = write(tmp_path / "trace.csv", HEADER + "\n".join(lines) + "\n")
    workload = generate_workload({"toy": application()}, GenerateSettings(num_jobs=8), path)
    assert len({job.time for job in workload.jobs}) == 1


def test_other_columns_are_ignored(tmp_path):
    header = "cluster,gpu_time,num_gpus,duration,timestamp\n"
    path = write(tmp_path / "trace.csv", header + "a,not a number,4,7200,2020-01-01 00:00:00\n")
    settings = GenerateSettings(num_jobs=1, realistic=True)
    (job,) = generate_workload({"toy": application()}, settings, path).jobs
    assert job.num_gpus == 4


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", r"trace.csv, line 1, field 'timestamp': column is missing"),
        ("timestamp,duration\n", r"line 1, field 'num_gpus': column is missing"),
        (HEADER, "none of its 0 jobs can be used"),
        (HEADER + "0,10,1\n0,600,0\n", "none of its 2 jobs can be used; give jobs with num_gpus 1 or more"),
        (
            HEADER + "0,600,1\nmonday,600,1\n",
            r"line 3, field 'timestamp': 'monday': give a date and time like",
        ),
        (HEADER + "nan,600,1\n", r"line 2, field 'timestamp': 'nan': give a date and time"),
        (HEADER + ",600,1\n", r"line 2, field 'timestamp': '': is missing"),
        (HEADER + "0,long,1\n", r"line 2, field 'duration': 'long': give a finite number, 0 or more"),
        (HEADER + "0,-5,1\n", r"line 2, field 'duration': '-5': give a finite number"),
        (HEADER + "0,600,1.5\n", r"line 2, field 'num_gpus': '1.5': give a whole number, 0 or more"),
        (HEADER + "0,600\n", r"line 2, field 'num_gpus': '': is missing"),
    ],
)
def test_bad_traces_are_refused_with_file_line_field_and_remedy(tmp_path, text, said):
    path = write(tmp_path / "trace.csv", text)
    with pytest.raises(InvalidInput, match=said) as caught:
        generate_workload({"toy": application()}, GenerateSettings(), path)
    assert str(path) in str(caught.value)


def test_a_missing_trace_is_refused(tmp_path):
    with pytest.raises(InvalidInput, match="no such file"):
        generate_workload({"toy": application()}, GenerateSettings(), tmp_path / "none.csv")


def sized(name, gpu_hours):
    """An application of so many hours on one GPU at its initial batch, which is its best there."""
    hours = application().progress[-1] * 0.074 / 3600
    limits = BatchLimits(initial=64, maximum=64, local_min=8, local_max=64)
    return application(name, steps_per_epoch=1000 * gpu_hours / hours, limits=limits)


@pytest.mark.parametrize(
    ("gpu_hours", "drawn"),
    [(0.5, {"minutes"}), (2.0, {"hours", "more-hours"}), (50.0, {"hours", "more-hours"}), (500.0, {"weeks"})],
)
def test_gpu_time_chooses_among_applications_of_that_class_or_the_nearest(tmp_path, gpu_hours, drawn):
    known = {
        name: sized(name, hours)
        for name, hours in {"minutes": 0.2, "hours": 1.5, "more-hours": 8.0, "weeks": 300.0}.items()
    }
    path = write(tmp_path / "trace.csv", HEADER + f"0,{gpu_hours * 3600},1\n")
    workload = generate_workload(known, GenerateSettings(num_jobs=40), path)
    assert {job.application for job in workload.jobs} == drawn


def test_published_names_keep_their_published_class(tmp_path):
    known = {name: sized(name, 5.0) for name in ("cifar10", "bert", "own")}
    path = write(tmp_path / "trace.csv", HEADER + "0,600,1\n")
    workload = generate_workload(known, GenerateSettings(num_jobs=20), path)
    assert {job.application for job in workload.jobs} == {"cifar10"}


def test_the_published_trace_gives_workloads_like_the_published(osdi21_data, measured):
    published = [read_workload(osdi21_data / "workloads" / f"workload-{number}.csv").jobs for number in (1, 3, 6)]
    settings = GenerateSettings(num_jobs=480)
    workload = generate_workload(measured, settings, osdi21_data / "philly.csv")
    check_applications(workload, measured, 64)
    ours = [workload.jobs]

    def mix(workloads):
        names = Counter(job.application for jobs in workloads for job in jobs)
        return np.array([names[name] / names.total() for name in sorted(measured)])

    def hours(workloads):
        return np.histogram([job.time for jobs in workloads for job in jobs], bins=np.arange(9) * 3600)[0]

    assert np.abs(mix(ours) - mix(published)).max() < 0.06
    assert np.corrcoef(hours(ours), hours(published))[0, 1] > 0.8


def test_realistic_users_of_the_published_trace_mostly_ask_for_one_gpu(osdi21_data, measured):
    settings = GenerateSettings(realistic=True)
    workload = generate_workload(measured, settings, osdi21_data / "philly.csv")
    check_applications(workload, measured, 64)
    assert sum(job.num_gpus == 1 for job in workload.jobs) > 0.85 * len(workload.jobs)
    wider = replace(settings, nodes=1, gpus_per_node=2)
    assert max(job.num_gpus for job in generate_workload(measured, wider).jobs) <= 2
