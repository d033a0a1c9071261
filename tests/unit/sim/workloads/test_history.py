"""A history that is simulated again comes out as it went; what cannot be told is left out with a reason."""

import json
import math
import statistics
from dataclasses import replace
from typing import ClassVar

import pytest

import pollux.sim.simulation.simulation as simulation
from pollux.controller import (
    Controller,
    DecisionMade,
    JobCancelled,
    JobFinished,
    JobReported,
    JobRunning,
    JobSpec,
    JobSubmitted,
    NodeAdded,
    NodeRemoved,
    QueueChanged,
)
from pollux.controller.messages.events import GenerationEnded
from pollux.core import Cluster, Decision, InvalidInput, JobLimits, Node, Queue
from pollux.goodput import BatchLimits, FabricThroughput, PublishedThroughput
from pollux.policies import create, names
from pollux.sim import SimulationSettings, simulate
from pollux.sim.applications.modelled import ModelledApplication, NoiseSchedule
from pollux.sim.workloads.history import History, NoiseTable, read_history
from pollux.sim.workloads.workload import Workload, WorkloadJob
from pollux.store import SavedState, TelemetryRow, open_store, open_telemetry
from pollux.store.history import export
from pollux.testing import goodput_model, place

WIDE = ModelledApplication(
    name="wide",
    throughput=FabricThroughput(0.02, 0.002, 0.03, 4e-4, 0.01, 1e-4, 2.0),
    noise=NoiseSchedule(start=500, end=8_000, decays=(0.5,), step=2.0),
    limits=BatchLimits(initial=64, maximum=4_096, local_min=8, local_max=256),
    epochs=30,
    steps_per_epoch=600,
)
NARROW = ModelledApplication(
    name="narrow",
    throughput=PublishedThroughput(0.03, 3e-4, 0.05, 2e-3, 0.02, 5e-4, 1.6),
    noise=NoiseSchedule(start=2_000, end=3_000),
    limits=BatchLimits(initial=128, maximum=2_048, local_min=32, local_max=512),
    epochs=12,
    steps_per_epoch=900,
)
APPLICATIONS = {"wide": WIDE, "narrow": NARROW}
WORKLOAD = Workload(
    "ten",
    tuple(
        WorkloadJob(f"j{index}", 137.0 * index, "wide" if index % 3 else "narrow", 2, 128)
        for index in range(10)
    ),
)  # fmt: skip


class Recorded(Controller):
    """Starts without nodes and learns of them as facts, like the one in the service; keeps all facts."""

    log: ClassVar[list[object]] = []

    def __init__(self, cluster, settings):
        super().__init__(Cluster(()), settings)
        Recorded.log = []
        for node in cluster.nodes:
            self.apply(NodeAdded(0.0, node))

    def apply(self, event):
        commands = super().apply(event)
        Recorded.log.append(event)
        return commands


def recorded(monkeypatch, policy, settings):
    with monkeypatch.context() as patch:
        patch.setattr(simulation, "Controller", Recorded)
        return simulate(WORKLOAD, create(policy), APPLICATIONS, settings), list(Recorded.log)


def history_of(events, rows=(), **more):
    store, telemetry = open_store(None), open_telemetry(None)
    store.append(events)
    telemetry.record(rows)
    return read_history(list(export(store, telemetry)), **more)


def completions(outcome):
    return {job.name: job.finished - job.submitted for job in outcome.jobs}


def rows_of(events):
    """Measurements beside the facts, as the service keeps them: where each job stood at each of its reports."""
    for event in events:
        if isinstance(event, JobReported) and event.remaining is not None:
            number = int(event.job_id[1:])
            application = WIDE if number % 3 else NARROW
            total = application.progress[-1] * application.limits.initial
            values = {"progress": total - event.remaining, "total_progress": total}
            yield TelemetryRow(event.job_id, event.at, "report", values)


@pytest.mark.parametrize(("trigger", "rows"), [("rounds", False), ("rounds", True), ("events", True)])
def test_a_replay_takes_as_long_as_the_recorded_run(monkeypatch, trigger, rows):
    """From facts alone, and from facts and reports.

    Simulated jobs under `events` tell late that they run, and two that are alike may then change places.
    """
    settings = SimulationSettings(num_nodes=4, gpus_per_node=4, trigger=trigger)
    before, events = recorded(monkeypatch, "pollux", settings)
    past = history_of(events, list(rows_of(events)) if rows else ())
    assert (past.num_nodes, past.gpus_per_node, past.skipped) == (4, 4, ())
    assert [(job.name, job.time, job.num_gpus) for job in past.workload.jobs] == [
        (job.name, job.time, job.num_gpus) for job in WORKLOAD.jobs
    ]
    after = simulate(past.workload, create("pollux"), past.applications, settings)
    was, now = completions(before), completions(after)
    assert statistics.fmean(now.values()) == pytest.approx(statistics.fmean(was.values()), rel=0.03)
    alike = 0.05 if trigger == "rounds" else 0.2
    assert all(now[name] == pytest.approx(was[name], rel=alike) for name in was)


def test_another_size_or_policy_comes_out_like_the_truth(monkeypatch):
    """What `whatif` says, against a simulation of the true applications."""
    small = SimulationSettings(num_nodes=2, gpus_per_node=4)
    large = replace(small, num_nodes=6)
    _, events = recorded(monkeypatch, "pollux", small)
    past = history_of(events)
    for policy, settings in (("pollux", large), ("tiresias", small)):
        true = simulate(WORKLOAD, create(policy), APPLICATIONS, settings)
        told = simulate(past.workload, create(policy), past.applications, settings)
        expected = statistics.fmean(completions(true).values())
        assert statistics.fmean(completions(told).values()) == pytest.approx(expected, rel=0.1)


def test_the_learned_model_and_the_noise_over_progress_are_kept(monkeypatch):
    _, events = recorded(monkeypatch, "pollux", SimulationSettings(num_nodes=4, gpus_per_node=4))
    past = history_of(events)
    application = past.applications["j1"]
    assert application.progress[-1] == pytest.approx(WIDE.progress[-1], rel=0.02)
    assert application.limits == WIDE.limits
    for share in (0.1, 0.4, 0.6, 0.9):
        assert application.noise.at(share) == pytest.approx(WIDE.noise.at(share), rel=0.2)


NODE = NodeAdded(0.0, Node("n0", 4))
EIGHT = NodeAdded(0.0, Node("n0", 8))


def life(job_id="j", limits=None, end=None, at=100.0, gpus=2, model=None, remaining=None, revision=2):
    """A job that starts at `at`, runs from 10 s later, and ends 200 s after that."""
    events = [
        JobSubmitted(at, JobSpec(job_id, limits or JobLimits(max_gpus=4), requested_gpus=3)),
        DecisionMade(at, revision, Decision({job_id: place(f"n0:{gpus}")})),
        JobRunning(at + 10.0, job_id, 1),
    ]
    if model is not None or remaining is not None:
        events.append(JobReported(at + 60.0, job_id, model, remaining, 4.0))
    return [*events, end] if end is not None else events


def test_a_job_without_a_model_takes_as_long_as_it_took():
    past = history_of([NODE, *life(limits=JobLimits(2, 2), end=JobFinished(310.0, "j"))])
    (job,) = past.workload.jobs
    assert (job.time, job.num_gpus) == (0.0, 2)
    settings = SimulationSettings(num_nodes=1, gpus_per_node=4, trigger="events", resize_seconds=0.0)
    for policy in ("fifo", "tiresias", "pollux"):
        (outcome,) = simulate(past.workload, create(policy), past.applications, settings).jobs
        assert outcome.finished == pytest.approx(200.0)


@pytest.mark.parametrize("gpus", [1, 2, 3, 5, 7])
def test_on_fewer_gpus_than_it_had_a_job_without_a_model_takes_longer_in_proportion(gpus):
    past = history_of([EIGHT, *life(limits=JobLimits(1, 8), gpus=7, end=JobFinished(310.0, "j"))])
    workload, left_out = past.on(1, gpus)
    assert (workload.jobs[0].num_gpus, left_out) == (min(gpus, 7), ())
    settings = SimulationSettings(num_nodes=1, gpus_per_node=gpus, trigger="events", resize_seconds=0.0)
    (outcome,) = simulate(workload, create("fifo"), past.applications, settings).jobs
    assert outcome.finished == pytest.approx(200.0 * 7 / gpus, rel=2e-3)


def test_a_crash_does_not_count_as_work():
    events = [NODE, *life(end=GenerationEnded(150.0, "j", 1, "lost"))]
    again = [DecisionMade(160.0, len(events), Decision({"j": place("n0:2")})), JobRunning(170.0, "j", 3)]
    controller = Controller(Cluster(()))
    for event in events:
        controller.apply(event)
    again[1] = JobRunning(170.0, "j", controller.jobs["j"].generation + 1)
    past = history_of([*events, *again, JobFinished(370.0, "j")])
    assert past.applications["j"].progress[-1] == pytest.approx(200.0)


def test_a_model_without_a_total_counts_what_was_done_before_the_first_report():
    model = goodput_model()
    past = history_of([NODE, *life(model=model, remaining=50_000.0)])
    expected = 50.0 * model.goodput(1, 2) + 50_000.0
    assert past.applications["j"].progress[-1] * 128 == pytest.approx(expected)
    assert past.skipped == ()
    assert past.resize_seconds == 4.0


def test_a_model_that_says_nothing_of_the_rest_goes_by_what_was_done():
    model = goodput_model()
    past = history_of([NODE, *life(model=model, end=JobFinished(310.0, "j"))])
    assert past.applications["j"].progress[-1] * 128 == pytest.approx(200.0 * model.goodput(1, 2))
    with_reason = history_of([NODE, *life(model=model)])
    assert with_reason.skipped == ("job 'j': never said how much there is to do, and did not finish",)


def report(at, progress, total=10_000.0, scale=100.0, **more):
    values = {"progress": progress, "total_progress": total, "noise": {"scale": scale}, "model": None, **more}
    return TelemetryRow("j", at, "report", values)


MODEL = {
    "parameters": [0.0125, 3e-4, 0.08, 0.002, 0.02, 5e-4, 2.0], "gpu_type": "", "initial_batch": 128,
    "max_batch": 4096, "local_batch_max": 512, "grad_sqr": 1.0, "grad_var": 4.0,
}  # fmt: skip


def test_reports_tell_more_than_facts():
    """The total, the noise at several shares, and the model of the last report."""
    rows = [report(120.0, 0.0, scale=100.0), report(180.0, 5_000.0, scale=400.0)]
    rows += [report(300.0, 9_900.0, model=MODEL)]
    past = history_of([NODE, *life(model=goodput_model(noise_scale=800.0), end=JobFinished(310.0, "j"))], rows)
    application = past.applications["j"]
    assert application.progress[-1] * 128 == pytest.approx(10_000.0)
    assert application.throughput.parameters == tuple(MODEL["parameters"])
    assert [round(application.noise.at(share)) for share in (0.0, 0.25, 0.5, 0.99)] == [100, 200, 400, 512]


def test_a_report_that_cannot_be_read_is_passed_over():
    rows = [report(120.0, "much"), report(130.0, 1.0, model={"parameters": 3}), report(140.0, None, total="x")]
    past = history_of([NODE, *life(model=goodput_model(), remaining=1e4, end=JobFinished(310.0, "j"))], rows)
    assert past.skipped == ()


def test_a_cancelled_job_counts_as_far_as_it_came():
    rows = [report(200.0, 2_500.0)]
    past = history_of([NODE, *life(model=goodput_model(), end=JobCancelled(250.0, "j"))], rows)
    assert past.applications["j"].progress[-1] * 128 == pytest.approx(2_500.0)
    early = history_of([NODE, JobSubmitted(1.0, JobSpec("j")), JobCancelled(2.0, "j")])
    assert early.skipped == ("job 'j': cancelled without having run",)


def test_of_a_job_that_only_crashed_it_is_said_that_it_ran():
    past = history_of([NODE, *life(end=GenerationEnded(117.0, "j", 1, "crashed"))])
    assert past.skipped == ("job 'j': failed: it ran for 7 s, but only up to crashes, and such work is not replayed",)


def test_a_rigid_job_with_a_model_keeps_its_gpus():
    past = history_of([NODE, *life(limits=JobLimits(2, 2), model=goodput_model(), remaining=1e5)])
    assert past.applications["j"].fixed.num_gpus == 2
    assert past.workload.jobs[0].num_gpus == 2
    elastic = history_of([NODE, *life(model=goodput_model(), remaining=1e5)])
    assert elastic.applications["j"].fixed is None
    assert elastic.applications["j"].terms.limits == JobLimits(max_gpus=4)


def crowd(**limits):
    """Seven jobs at once on eight GPUs: rigid ones of odd sizes with and without a model, and elastic ones."""
    events = [EIGHT]
    for index in range(7):
        rigid = index % 2 == 0
        size = (3, 5, 1, 7)[index // 2] if rigid else 1
        mine = JobLimits(size, size, **limits) if rigid else JobLimits(1, 8)
        model = goodput_model() if index in (1, 3, 4, 5, 6) else None
        at = 1_000.0 * index
        name = f"{'rigid' if rigid else 'free'}{size}-{index}"
        end = JobFinished(at + 210.0, name)
        total = None if model is None else 2e5
        revision = len(events) + 1
        events += life(name, mine, end, at, max(size, 2) if not rigid else size, model, total, revision)
    past = history_of(events)
    assert past.skipped == ()
    # All at once, so that they stand in each other's way.
    together = replace(past.workload, jobs=tuple(replace(job, time=0.0) for job in past.workload.jobs))
    return together, past.applications


@pytest.mark.parametrize("trigger", ["rounds", "events"])
@pytest.mark.parametrize("policy", names())
def test_rigid_jobs_of_odd_sizes_keep_their_gpus_under_every_policy(policy, trigger):
    workload, applications = crowd()
    settings = SimulationSettings(num_nodes=1, gpus_per_node=8, trigger=trigger)
    # A short search is enough to see what it may not choose.
    options = {"population": 10, "generations": 3} if policy == "pollux-genetic" else {}
    outcome = simulate(workload, create(policy, **options), applications, settings)
    sizes = {job.name: {gpus for _, gpus, _, _ in job.samples if gpus} for job in outcome.jobs}
    assert {name: sizes[name] for name in sizes if name.startswith("rigid")} == {
        "rigid3-0": {3}, "rigid5-2": {5}, "rigid1-4": {1}, "rigid7-6": {7},
    }  # fmt: skip


@pytest.mark.parametrize("policy", ["pollux", "tiresias", "srtf"])
def test_pinned_jobs_are_never_stopped_in_a_replay(policy):
    workload, applications = crowd(pinned=True, preemptible=False)
    outcome = simulate(workload, create(policy), applications, SimulationSettings(num_nodes=1, gpus_per_node=8))
    assert {job.restarts for job in outcome.jobs if job.name.startswith("rigid")} == {0}


def test_weights_and_quotas_go_into_the_replay():
    spec = JobSpec("a", JobLimits(2, 2), requested_gpus=2, weight=4.0, queue="small")
    events = [NODE, QueueChanged(0.0, Queue("small", 2.0, 3)), JobSubmitted(1.0, spec)]
    events += [JobSubmitted(1.0, replace(spec, id=job_id)) for job_id in "bcd"]
    events += [JobSubmitted(1.0, replace(spec, id="e", limits=JobLimits(4, 4)))]
    controller = Controller(Cluster(()))
    for index, job_id in enumerate("abcd"):
        at = 10.0 + 100.0 * index
        decision = Decision({job_id: place("n0:2")})
        events += [DecisionMade(at, len(events), decision), JobRunning(at, job_id, 1), JobFinished(at + 90.0, job_id)]
    for event in events:
        controller.apply(event)
    past = history_of([*events, JobCancelled(500.0, "e")])
    assert past.skipped == ("job 'e': cancelled without having run",)
    facts = []
    settings = SimulationSettings(num_nodes=1, gpus_per_node=4, resize_seconds=0.0)
    outcome = simulate(past.workload, create("fifo"), past.applications, settings, record=lambda e, _: facts.append(e))
    assert [event.queue for event in facts if isinstance(event, QueueChanged)] == [Queue("small", 2.0, 3)]
    assert {event.spec.weight for event in facts if isinstance(event, JobSubmitted)} == {4.0}
    ends = sorted(job.finished for job in outcome.jobs)
    starts = sorted(job.started for job in outcome.jobs)
    assert all(start >= end for start, end in zip(starts[1:], ends, strict=False)), "two at once exceed the quota"


def test_a_smaller_cluster_leaves_out_who_cannot_run_there():
    workload, applications = crowd()
    past = History(workload, applications, 1, 8)
    fitting, left_out = past.on(1, 4)
    assert left_out == (
        "job 'rigid5-2': needs 5 GPUs at once, and can have 4", "job 'rigid7-6': needs 7 GPUs at once, and can have 4",
    )  # fmt: skip
    outcome = simulate(fitting, create("pollux"), applications, SimulationSettings(num_nodes=1, gpus_per_node=4))
    assert len(outcome.jobs) == 5


def test_a_job_whose_quota_has_become_too_small_is_left_out():
    events = [NODE, *life(limits=JobLimits(2, 2), end=JobFinished(310.0, "j")), QueueChanged(320.0, Queue("", 1.0, 1))]
    past = history_of(events)
    assert past.skipped == ("job 'j': needs 2 GPUs at once, and could have 1 at the end of this history",)


def test_what_cannot_be_told_is_left_out_with_a_reason():
    past = history_of([NODE, *life("a", end=JobFinished(310.0, "a")), *life("b", at=400.0, revision=6)])
    assert [job.name for job in past.workload.jobs] == ["a"]
    assert past.skipped == ("job 'b': is running and has reported no model, so nothing says how long it takes",)


def test_nodes_that_come_and_go():
    many = [NodeAdded(float(index), Node(f"n{index}", 4 + 4 * (index == 1))) for index in range(3)]
    past = history_of([*many, NodeRemoved(50.0, "n1"), *life(revision=5)])
    assert (past.num_nodes, past.gpus_per_node) == (2, 8)
    assert "nodes of different sizes: taken as 2 x 8 GPUs" in past.skipped
    with pytest.raises(InvalidInput, match="names no node with GPUs"):
        history_of([JobSubmitted(0.0, JobSpec("a"))])


@pytest.mark.parametrize("at", [5, 9, 40])
def test_a_trimmed_log_goes_on_from_its_state(monkeypatch, at):
    settings = SimulationSettings(num_nodes=4, gpus_per_node=4)
    _, events = recorded(monkeypatch, "pollux", settings)
    controller = Controller(Cluster(()))
    store = open_store(None)
    for number, event in enumerate(events, start=1):
        controller.apply(event)
        store.append([event])
        if number in (at - 1, at):
            store.save(SavedState(number, json.loads(json.dumps(controller.state()))))
    assert store.trim(math.inf) == at - 1
    past = read_history(list(export(store)))
    assert past.skipped == ()
    assert len(past.workload.jobs) == 10
    again = simulate(past.workload, create("pollux"), past.applications, settings)
    whole = simulate(history_of(events).workload, create("pollux"), past.applications, settings)
    assert statistics.fmean(completions(again).values()) == pytest.approx(
        statistics.fmean(completions(whole).values()), rel=0.05
    )


def test_a_file_is_read_and_named(tmp_path):
    path = tmp_path / "may.ndjson"
    store = open_store(None)
    store.append([NODE, *life(end=JobFinished(310.0, "j"))])
    path.write_bytes(b"".join(export(store)))
    assert read_history(path).workload.name == "may"
    with pytest.raises(InvalidInput, match=r"none.ndjson: cannot be read"):
        read_history(tmp_path / "none.ndjson")
    path.write_text("name,time\n")
    with pytest.raises(InvalidInput, match=r"may.ndjson: history, line 1: is not JSON"):
        read_history(path)


def test_facts_that_do_not_fit_are_named():
    with pytest.raises(InvalidInput, match="fact 2 does not fit those before it: unknown job 'nobody'"):
        history_of([NODE, JobFinished(1.0, "nobody")])


def test_noise_between_and_beyond_its_points():
    table = NoiseTable(10.0, 1000.0, points=((0.2, 10.0), (0.6, 1000.0)))
    assert [round(table.at(share), 6) for share in (0.0, 0.2, 0.4, 0.6, 1.0)] == [10.0, 10.0, 100.0, 1000.0, 1000.0]
    assert NoiseTable(7.0, 7.0, points=((0.5, 7.0),)).at(0.1) == 7.0
