"""The files of `--output`: plots, the results as JSON, and one self-contained HTML page."""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

import pollux.policies as registry
from pollux.sim.applications.application import Application
from pollux.sim.results.fairness import DEFINITION
from pollux.sim.results.metrics import describe_world, to_json
from pollux.sim.results.plots import plot_gpus, plot_jct, plot_job, save
from pollux.sim.simulation.simulation import RunOutcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["chosen_job", "write_report"]

_COLUMNS = (
    ("policy", "policy", "{}"),
    ("avg_jct_hours", "avg JCT (h)", "{:.3f}"),
    ("p50_jct_hours", "p50 JCT (h)", "{:.3f}"),
    ("p99_jct_hours", "p99 JCT (h)", "{:.2f}"),
    ("makespan_hours", "makespan (h)", "{:.2f}"),
    ("restarts_per_job", "restarts per job", "{:.2f}"),
    ("gpu_hours", "GPU-hours", "{:.1f}"),
    ("utilization", "utilisation", "{:.0%}"),
    ("worst_ftf", "worst FTF", "{:.2f}"),
    ("unfair_fraction", "unfair jobs", "{:.0%}"),
    ("decision_ms_mean", "decision ms, mean", "{:.1f}"),
    ("decision_ms_max", "max", "{:.0f}"),
    ("cpu_seconds", "CPU s", "{:.1f}"),
)

_DEFINITIONS = (
    (
        "JCT",
        "Job completion time: from submission to finish, waiting and restarts included. Percentiles are "
        "linear between jobs.",
    ),
    ("Makespan", "From the first submission to the last finish."),
    ("Restarts", "Every placement of a job after its first, counted whenever its GPUs change."),
    (
        "Utilisation",
        "GPU time held, standing still for a resize included, over the cluster's GPU time in the makespan.",
    ),
    ("Goodput", "Throughput × statistical efficiency: useful samples per second."),
    (
        "Efficiency",
        "Progress per sample relative to the initial batch: (φ + M₀)/(φ + M), with noise scale φ, batch M "
        "and initial batch M₀.",
    ),
    ("FTF", DEFINITION),
    (
        "Classes",
        "By the GPU time of a whole training on the fewest GPUs: small below 1 hour, medium below 10, large below "
        "100, else huge; the published applications have their published class.",
    ),
    (
        "Lower bound",
        "Jobs are preempted and GPUs divided at will and at no cost, and every job knows its true speed: the larger of "
        "each job alone on the whole cluster, and all on one machine, the shortest remaining first.",
    ),
    ("Decision", "CPU time of one scheduling decision: snapshot, policy, check and plan."),
)

_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>
:root { --ink: #1c1e21; --paper: #fff; --faint: #63676e; --rule: #d9dce1; --stripe: #f4f5f7; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e7ea; --paper: #16181c; --faint: #a2a7b0; --rule: #3a3e46; --stripe: #1f2228; }
}
body { color: var(--ink); background: var(--paper); font: 15px/1.5 system-ui, sans-serif; }
body { margin: 2rem auto; max-width: 70rem; padding: 0 1rem; }
h1, h2 { line-height: 1.2; }
h2 { margin-top: 2.5rem; }
.faint, figcaption { color: var(--faint); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 1rem 0; }
th, td { border-bottom: 1px solid var(--rule); padding: .3rem .6rem; text-align: right; white-space: nowrap; }
th { vertical-align: bottom; white-space: normal; }
th:first-child, td:first-child { text-align: left; }
tbody tr:nth-child(even) { background: var(--stripe); }
figure { margin: 1.5rem 0; }
img { background: #fff; border: 1px solid var(--rule); border-radius: 6px; height: auto; max-width: 100%; }
dt { font-weight: 600; margin-top: .6rem; }
dd { margin-left: 0; }
pre { background: var(--stripe); overflow-x: auto; padding: 1rem; }
summary { cursor: pointer; }
</style>
</head>
<body>
<h1>$title</h1>
$world
$sections
<h2>Definitions</h2>
<dl>
$definitions
</dl>
<h2>Configuration</h2>
<details><summary>Everything the results depend on</summary><pre>$config</pre></details>
<p class="faint">Made by pollux $version.</p>
</body>
</html>
""")


def chosen_job(outcomes: Sequence[RunOutcome], applications: Mapping[str, Application]) -> str:
    """The job to plot by default: of those that adapt, the one with most GPU time."""
    run = next((run for run in outcomes if registry.create(run.policy).batch == "adaptive"), outcomes[0])
    adaptive = [job for job in run.jobs if applications[job.application].fixed is None]
    return max(adaptive or run.jobs, key=lambda job: job.gpu_seconds).name


def write_report(
    folder: Path,
    document: Mapping[str, Any],
    outcomes: Sequence[RunOutcome],
    applications: Mapping[str, Application],
    job: str | None = None,
) -> None:
    """Fill a folder with `results.json`, `report.html` and per workload `jct-`, `gpus-` and `job-NAME.png`.

    `job` names the one to plot over time; workloads without it get no such plot.
    """
    config = document["config"]
    num_gpus = config["num_nodes"] * config["gpus_per_node"]
    sections = []
    for workload, group in groupby(outcomes, key=lambda run: run.workload):
        runs = list(group)
        pictures = []
        for stem, caption, figure in _figures(runs, num_gpus, job or chosen_job(runs, applications)):
            image = io.BytesIO()
            save(figure, image)
            (folder / f"{stem}-{workload}.png").write_bytes(image.getvalue())
            pictures.append(_picture(image.getvalue(), caption))
        results = [result for result in document["results"] if result["workload"] == workload]
        sections.append(_section(workload, results, pictures, document.get("bounds_hours", {}).get(workload)))
    (folder / "results.json").write_text(to_json(document), encoding="utf-8")
    (folder / "report.html").write_text(_page(document, sections), encoding="utf-8")


def _figures(runs: Sequence[RunOutcome], num_gpus: int, job: str) -> Iterator[tuple[str, str, Figure]]:
    yield "jct", "How many jobs were done within a time of their submission.", plot_jct(runs)
    caption = "GPUs held by each job (grey: waiting), and stacked by application, a band per job."
    yield "gpus", caption, plot_gpus(runs, num_gpus)
    if any(one.name == job for one in runs[0].jobs):
        yield "job", f"GPUs, total batch and statistical efficiency of {job}.", plot_job(runs, job)


def _picture(png: bytes, caption: str) -> str:
    source = base64.b64encode(png).decode("ascii")
    text = html.escape(caption)
    image = f'<img alt="{text}" src="data:image/png;base64,{source}">'
    return f"<figure>{image}<figcaption>{text}</figcaption></figure>"


def _section(
    workload: str, results: Sequence[Mapping[str, Any]], pictures: Sequence[str], bound_hours: float | None
) -> str:
    first = results[0]
    heads = [title for _, title, _ in _COLUMNS] + [f"avg JCT vs {first['policy']}"]
    rows = [
        [form.format(result[key]) for key, _, form in _COLUMNS]
        + [f"{result['avg_jct_hours'] / first['avg_jct_hours']:.2f}×"]
        for result in results
    ]
    jobs = _jobs_table(results)
    return (
        f"<h2>Workload {html.escape(workload)}</h2>\n<p>{len(first['jobs'])} jobs. {_bound(bound_hours)}</p>\n"
        + _table(heads, rows)
        + _classes_table(results)
        + "\n"
        + "\n".join(pictures)
        + f"\n<details><summary>Every job</summary>{jobs}</details>"
    )


def _bound(hours: float | None) -> str:
    return "" if hours is None else f"No schedule can have an average JCT below {hours:.3f} h."


def _classes_table(results: Sequence[Mapping[str, Any]]) -> str:
    """Completion times by class, if jobs are of several classes."""
    names = list(dict.fromkeys(name for result in results for name in result["classes"]))
    if len(names) < 2:
        return ""
    heads = ["policy"]
    for name in names:
        jobs = results[0]["classes"].get(name, {}).get("jobs", 0)
        heads += [f"{name} ({jobs} jobs): avg JCT (h)", "worst FTF"]
    rows = []
    for result in results:
        row = [result["policy"]]
        for name in names:
            mine = result["classes"].get(name)
            row += ["", ""] if mine is None else [f"{mine['avg_jct_hours']:.3f}", f"{mine['worst_ftf']:.2f}"]
        rows.append(row)
    return "\n" + _table(heads, rows)


def _jobs_table(results: Sequence[Mapping[str, Any]]) -> str:
    heads = ["job", "submitted (h)"]
    heads += [f"{result['policy']}: {what}" for result in results for what in ("JCT (h)", "restarts", "GPU-h", "FTF")]
    rows = []
    for lives in zip(*(result["jobs"] for result in results), strict=True):
        row = [lives[0]["name"], f"{lives[0]['submitted'] / 3600:.2f}"]
        for life in lives:
            row += [
                f"{(life['finished'] - life['submitted']) / 3600:.3f}",
                str(life["restarts"]),
                f"{life['gpu_seconds'] / 3600:.2f}",
                f"{life['ftf']:.2f}",
            ]
        rows.append(row)
    return _table(heads, rows)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(title)}</th>" for title in heads)
    body = "\n".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def _page(document: Mapping[str, Any], sections: Sequence[str]) -> str:
    config = document["config"]
    names = ", ".join(policy["name"] for policy in config["policies"])
    return _PAGE.substitute(
        title=html.escape(f"Simulated scheduling: {names}"),
        world="\n".join(f'<p class="faint">{html.escape(line)}</p>' for line in describe_world(config)),
        sections="\n".join(sections),
        definitions="\n".join(
            f"<dt>{html.escape(word)}</dt><dd>{html.escape(text)}</dd>" for word, text in _DEFINITIONS
        ),
        config=html.escape(json.dumps(config, indent=2)),
        version=html.escape(document["version"]),
    )
