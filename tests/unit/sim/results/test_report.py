"""What `--output` writes: pictures that show what they should, and a page that needs nothing else."""

import importlib.util
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from pollux.core import InvalidInput
from pollux.sim.results import plots
from pollux.sim.results.fairness import DEFINITION
from pollux.sim.results.metrics import configuration, document, measure
from pollux.sim.results.plots import plot_gpus, plot_jct, plot_job, save
from pollux.sim.results.report import chosen_job, write_report
from pollux.sim.simulation.compare import choose_policies, compare
from pollux.sim.simulation.simulation import JobOutcome, RunOutcome, SimulationSettings
from pollux.sim.workloads.builtin import builtin_applications
from pollux.sim.workloads.workload import Workload, WorkloadJob

APPLICATIONS = builtin_applications()
SETTINGS = SimulationSettings(num_nodes=2, gpus_per_node=4, seed=1)
PNG = b"\x89PNG\r\n"


def request(name, time, application="recsys"):
    return WorkloadJob(name, time, application, 2, APPLICATIONS[application].limits.initial)


WORKLOADS = [
    Workload("first", (request("a", 0.0), request("b", 100.0), request("<b>&", 200.0))),
    Workload("second", (request("a", 0.0), request("c", 50.0, "resnet-small"))),
]


@pytest.fixture(scope="module")
def runs():
    chosen = choose_policies(["pollux", "fifo"], {})
    outcomes = compare(WORKLOADS, chosen, APPLICATIONS, SETTINGS)
    results = [measure(outcome, APPLICATIONS, SETTINGS) for outcome in outcomes]
    return outcomes, document(configuration(WORKLOADS, chosen, APPLICATIONS, SETTINGS), results)


@pytest.fixture(scope="module")
def folder(runs, tmp_path_factory):
    path = tmp_path_factory.mktemp("report")
    outcomes, results = runs
    write_report(path, results, outcomes, APPLICATIONS)
    return path


class Page(HTMLParser):
    """Collects tags, addresses and text, and checks that what is opened is closed."""

    def __init__(self, text):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.addresses += [value for name, value in attributes if name in ("src", "href", "srcset")]
        if tag not in ("img", "meta"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        self.text.append(text)


@pytest.fixture(scope="module")
def page(folder):
    return Page((folder / "report.html").read_text())


def test_files(folder):
    assert sorted(path.name for path in folder.iterdir()) == [
        "gpus-first.png", "gpus-second.png", "jct-first.png", "jct-second.png", "job-first.png",
        "job-second.png", "report.html", "results.json",
    ]  # fmt: skip
    assert all(path.read_bytes().startswith(PNG) for path in folder.glob("*.png"))


def test_results_are_the_document(folder, runs):
    assert json.loads((folder / "results.json").read_text()) == json.loads(json.dumps(runs[1]))


def test_page_needs_nothing_beside_it(page, folder):
    assert len(page.addresses) == 6
    assert all(address.startswith("data:image/png;base64,") for address in page.addresses)
    assert not {"script", "link", "iframe"} & set(page.tags)
    assert not re.search(r"https?://|@import|url\(", (folder / "report.html").read_text())


def test_page_says_what_was_run_and_what_words_mean(page):
    text = " ".join(page.text)
    assert DEFINITION in text
    for phrase in (
        "2 nodes × 4 GPUs",
        "Workload first",
        "Workload second",
        "pollux",
        "fifo",
        "<b>&",
        "Makespan",
    ):
        assert phrase in text


def test_page_is_made_for_light_and_dark(folder):
    text = (folder / "report.html").read_text()
    assert "prefers-color-scheme: dark" in text
    assert 'name="color-scheme" content="light dark"' in text


def test_chosen_job_adapts_and_held_most(runs):
    outcomes, _ = runs
    pollux = outcomes[2]
    assert chosen_job(outcomes[2:], APPLICATIONS) == max(pollux.jobs, key=lambda job: job.gpu_seconds).name


def test_named_job_is_plotted_where_it_is(runs, tmp_path):
    outcomes, results = runs
    write_report(tmp_path, results, outcomes, APPLICATIONS, job="c")
    assert sorted(path.name for path in tmp_path.glob("job-*.png")) == ["job-second.png"]


def life(name, submitted, finished, *samples, application="x"):
    held = sum((until[0] - at[0]) * at[1] for at, until in zip(samples, (*samples[1:], (finished,)), strict=True))
    return JobOutcome(name, application, submitted, samples[0][0], finished, 0, held, samples)


@pytest.fixture
def by_hand():
    hour = 3600.0
    jobs = (
        life("a", 0.0, 2 * hour, (0.0, 2, 64, 1.0), (hour, 4, 128, 0.9)),
        life("b", 0.0, 3 * hour, (hour, 1, 32, 1.0), (2 * hour, 0, 0, 0.0), (2.5 * hour, 1, 32, 1.0)),
    )
    return RunOutcome("w", "some", jobs, (0.0,), 0.0)


def curve(line):
    return np.asarray(line.get_xdata()), np.asarray(line.get_ydata())


def area(path):
    x, y = np.asarray(path.vertices)[:-1].T
    return abs(np.dot(x, np.roll(y, 1)) - np.dot(y, np.roll(x, 1))) / 2


def test_stacked_bands_cover_the_gpu_time(by_hand):
    bands = plot_gpus([by_hand], 8).axes[1].collections[0]
    covered = sum(area(path) for path in bands.get_paths())
    assert covered == pytest.approx(sum(job.gpu_seconds for job in by_hand.jobs) / 3600)


def test_lanes_show_gpus_and_waiting(by_hand):
    waiting, held = plot_gpus([by_hand], 8).axes[0].collections
    assert len(waiting.get_paths()) == 2
    assert np.exp2(np.asarray(held.get_array())).tolist() == [2, 4, 1, 1]


def test_completion_times_rise_to_one(by_hand):
    hours, shares = curve(plot_jct([by_hand]).axes[0].lines[0])
    assert hours.tolist() == [2, 2, 3]
    assert shares.tolist() == [0, 0.5, 1]


def test_job_over_time(by_hand):
    gpus, batch, efficiency = (curve(axes.lines[0])[1] for axes in plot_job([by_hand], "b").axes)
    assert gpus.tolist() == [1, 0, 1, 1]
    assert np.isnan(batch[1]), "a job that does not run has no batch"
    assert np.isnan(efficiency[1])
    assert batch[[0, 2, 3]].tolist() == [32, 32, 32]


def test_many_policies_and_jobs_can_be_drawn(by_hand, tmp_path):
    many = [replace(by_hand, policy=f"policy {i}") for i in range(9)]
    save(plot_jct(many), tmp_path / "many.png")
    assert (tmp_path / "many.png").read_bytes().startswith(PNG)


def test_missing_matplotlib_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidInput, match=r"pip install 'pollux-scheduler\[plot\]'"):
        plots.require_matplotlib()
