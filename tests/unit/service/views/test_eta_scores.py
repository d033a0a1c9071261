"""Predicted intervals hold the share of ends that they should, also where models are wrong and GPUs come and go."""

import math
import random
from dataclasses import dataclass, replace

import pytest

import pollux.sim.simulation.simulation as simulation
from pollux.controller import Controller, JobFinished, JobReported, JobSpec, JobState, JobSubmitted
from pollux.controller.explanations.eta import NOMINAL, Interval, eta, widening
from pollux.goodput import BatchLimits, FabricThroughput, GoodputModel
from pollux.policies import create
from pollux.service.views.estimates import times_of
from pollux.service.views.eta_scores import EtaBook
from pollux.sim import SimulationSettings, simulate
from pollux.sim.applications.modelled import ModelledApplication, NoiseSchedule
from pollux.sim.workloads.workload import Workload, WorkloadJob
from pollux.store import TelemetryRow, open_telemetry
from pollux.testing import cluster
from pollux.wire.status import Eta

APPLICATION = ModelledApplication(
    name="net",
    throughput=FabricThroughput(0.02, 0.002, 0.03, 4e-4, 0.01, 1e-4, 2.0),
    noise=NoiseSchedule(start=500, end=8_000, decays=(0.5,), step=2.0),
    limits=BatchLimits(initial=64, maximum=4_096, local_min=8, local_max=256),
    epochs=12,
    steps_per_epoch=800,
)


@dataclass(frozen=True, slots=True)
class Wrong:
    """A model that promises `factor` times the true goodput."""

    truth: GoodputModel
    factor: float

    def goodput(self, num_nodes, num_gpus, gpu_type=""):
        return self.factor * self.truth.goodput(num_nodes, num_gpus, gpu_type)


class Watched(Controller):
    """Gives jobs models that are wrong, by `bias` and a draw of their own, and shows the book what a service would."""

    book: EtaBook
    bias: float
    spread: float

    def apply(self, event):
        if isinstance(event, JobReported) and event.goodput is not None:
            draw = random.Random(event.job_id).gauss(self.bias, self.spread)
            event = replace(event, goodput=Wrong(event.goodput, math.exp(draw)))
        commands = super().apply(event)
        if isinstance(event, JobReported | JobFinished):
            record = self.jobs[event.job_id]
            total = APPLICATION.progress[-1] * APPLICATION.limits.initial
            left = 0.0 if record.remaining is None else record.remaining
            row = TelemetryRow(event.job_id, event.at, "report", {"progress": total - left, "total_progress": total})

            def predict():
                return times_of(eta(record, self.snapshot(event.at), self.jobs), event.at)

            self.book.note(record, predict, row, event.at)
        return commands


def run(monkeypatch, bias, spread, num_jobs=26):
    """Jobs that arrive while others train, so that the GPUs of each change several times."""
    Watched.book, Watched.bias, Watched.spread = EtaBook(open_telemetry(None)), bias, spread
    workload = Workload("many", tuple(WorkloadJob(f"j{i}", 170.0 * i, "net", 2, 128) for i in range(num_jobs)))
    with monkeypatch.context() as patch:
        patch.setattr(simulation, "Controller", Watched)
        outcome = simulate(
            workload,
            create("pollux"),
            {"net": APPLICATION},
            SimulationSettings(num_nodes=1, gpus_per_node=8, resize_seconds=10.0),
        )
    return Watched.book, outcome


def later(book, warm_up=8):
    """Scores of jobs that ended after the first few, by which the book learns."""
    return list(book._scores.values())[warm_up:]


def mean(scores, name):
    return sum(score[name] * score["predictions"] for score in scores) / sum(score["predictions"] for score in scores)


def share_inside(scores):
    """Of the intervals before they were widened."""
    misses = [miss for score in scores for miss in score["misses"]]
    return sum(miss <= 0.0 for miss in misses) / len(misses)


# Models that promise twice the speed, as on a machine with more slots than cores, and models of which each errs by
# itself: on what they promise alone, an eighth and three quarters of the ends would lie inside.
@pytest.mark.parametrize(("bias", "spread", "alone", "width"), [(0.8, 0.3, 0.3, 4.0), (0.0, 1.0, 0.8, 12.0)])
def test_intervals_hold_their_share_of_ends_though_models_are_wrong(monkeypatch, bias, spread, alone, width):
    book, outcome = run(monkeypatch, bias, spread)
    assert sum(job.restarts for job in outcome.jobs) >= len(outcome.jobs), "GPUs come and go"
    scores = later(book)
    assert share_inside(scores) < alone
    assert mean(scores, "covered") >= 0.8
    assert book.overall()["covered"] >= 0.8, "those before anything was learned count too"
    assert mean(scores, "relative_width") <= width, "an interval that says nothing is always right"


def test_where_models_are_right_nothing_is_widened(monkeypatch):
    book, _ = run(monkeypatch, 0.0, 0.0, num_jobs=12)
    assert book.overall()["widened_by"] == 1.0
    assert book.overall()["covered"] >= NOMINAL
    assert all(score["relative_width"] <= 3.0 for score in book._scores.values())


def test_how_far_an_end_was_missed():
    interval = Interval(100.0, 150.0, 200.0)
    assert interval.miss(175.0) < 0.0
    assert interval.miss(400.0) == pytest.approx(math.log(3.0))
    assert interval.miss(125.0) == pytest.approx(math.log(2.0))
    assert interval.miss(50.0) == pytest.approx(math.log(50.0)), "an end that is over counts as a second"
    assert interval.widened(2.0) == Interval(100.0, 125.0, 300.0)
    assert interval.widened(3.0).miss(400.0) == pytest.approx(0.0)


def test_the_widening_is_the_quantile_of_past_misses():
    assert widening([]) == 1.0
    assert widening([-1.0, -2.0]) == 1.0
    assert widening([math.log(2.0)]) == pytest.approx(2.0)
    misses = [math.log(1.0 + index / 10) for index in range(20)]
    assert widening(misses) == pytest.approx(1.0 + 18 / 10)
    assert widening([100.0]) == 10.0


def record_of(state="running", **fields):
    desk = Controller(cluster(4))
    desk.apply(JobSubmitted(0.0, JobSpec("a")))
    return replace(desk.jobs["a"], state=JobState(state), **fields)


def at_share(share, at):
    return TelemetryRow("a", at, "report", {"progress": share, "total_progress": 1.0})


def test_what_was_learned_survives_a_restart():
    """The misses are kept with the score, and count before any interval was widened by them."""
    telemetry = open_telemetry(None)
    book = EtaBook(telemetry)
    for share, at in ((0.1, 10.0), (0.5, 50.0)):
        book.note(record_of(), lambda at=at: Eta(at + 10.0, at + 20.0, at + 15.0), at_share(share, at), at)
    book.note(record_of("succeeded", ended_at=110.0), lambda: None, None, 110.0)
    assert book.quality("a")["covered"] == 0.0
    assert set(book.quality("a")) == {"predictions", "covered", "relative_width", "median_error"}
    telemetry.record(book.pop_pending())
    for known in (book, EtaBook(telemetry)):
        assert known.overall()["widened_by"] == pytest.approx(5.0)
        shown = known.widened("b", Eta(1010.0, 1020.0, 1015.0), 1000.0)
        assert [shown.low, shown.high, shown.current] == pytest.approx([1002.0, 1100.0, 1015.0])


def test_a_job_whose_expected_end_has_moved_is_told_a_wider_interval():
    book = EtaBook(open_telemetry(None))
    book.note(record_of(), lambda: Eta(20.0, 30.0, 25.0), at_share(0.1, 10.0), 10.0)
    later_on = Eta(60.0, 80.0, 70.0)
    shown = book.widened("a", later_on, 30.0)
    assert [shown.low, shown.high] == pytest.approx([40.0, 180.0]), "three times too short before"
    assert book.widened("b", later_on, 30.0) == later_on
