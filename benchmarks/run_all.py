"""Every benchmark in turn, then one table: the claim, the bar, and what was measured.

python benchmarks/run_all.py [--quick] [--seed N]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

SCRIPTS = (
    "fit",
    "allocate",
    "simulate",
    "reproduce",
    "agent",
    "service",
    "local",
    "cli",
    "resize",
    "engines",
    "node_kills",
    "page",
)
# Besides: a script with further words, under a name of its own.
MORE: dict[str, tuple[str, ...]] = {"service_viewers": ("service", "--viewers", "100")}
# Not in quick runs: they need real clusters, and their bar is how often something was done.
LONG = ("node_kills",)
Results = dict[str, dict[str, Any]]


def run(name: str, arguments: list[str]) -> dict[str, Any]:
    """Run a script, passing its output on; its last line is the result."""
    print(f"== {name}", flush=True)
    script, *words = MORE.get(name, (name,))
    command = [sys.executable, str(Path(__file__).parent / f"{script}.py"), *words, *arguments]
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if last:
                print(last, flush=True)
            last = line.rstrip("\n")
    if process.returncode:
        raise SystemExit(f"{name}.py failed with exit code {process.returncode}")
    result: dict[str, Any] = json.loads(last)
    return result


def _claim(figure: str) -> Callable[[Results], Any]:
    return lambda results: results["reproduce"].get("claims", {}).get(figure)


def _size(key: str) -> Callable[[Results], Any]:
    return lambda results: results["allocate"]["summary"]["decision_ms_max"].get(key)


def _summary(figure: str) -> Callable[[Results], Any]:
    return lambda results: results["allocate"]["summary"].get(figure)


def _agent(figure: str) -> Callable[[Results], Any]:
    return lambda results: results["agent"].get(figure)


def _of(script: str, figure: str) -> Callable[[Results], Any]:
    return lambda results: results[script].get(figure)


def _coverage(results: Results) -> Any:
    """The least share of seeds whose interval held the truth."""
    return min(results["agent"]["noise_coverage"].values()) / results["agent"]["noise_seeds"]


def _page_memory(results: Results) -> Any:
    return results["page"]["server_memory_mib"]["most"]


# (claim, bar, whether lower is better, figure); a figure without a bar is told, and neither met nor missed.
CLAIMS: list[tuple[str, float | None, bool, Callable[[Results], Any]]] = [
    ("Tiresias and Optimus against published JCT, worst error", 0.001, True, _claim("baselines_worst_error")),
    ("pollux-genetic against published Pollux, worst error", 0.05, True, _claim("genetic_worst_error")),
    ("pollux against published Pollux, worst workload", 1.01, True, _claim("pollux_worst_ratio")),
    ("pollux against published Pollux, mean", 0.98, True, _claim("pollux_mean_ratio")),
    ("... at double load", 1.02, True, _claim("double_load_ratio")),
    ("... at intervals of 30 to 480 s, worst", 1.02, True, _claim("intervals_worst_ratio")),
    ("... with interference injected and not avoided, worst", 1.02, True, _claim("interference_worst_ratio")),
    ("average JCT below Tiresias, tuned jobs", 0.30, False, _claim("jct_below_tiresias")),
    ("average JCT below Optimus, tuned jobs", 0.50, False, _claim("jct_below_optimus")),
    ("makespan below Tiresias", 0.25, False, _claim("makespan_below_tiresias")),
    ("makespan below Optimus", 0.08, False, _claim("makespan_below_optimus")),
    ("average JCT below Tiresias, realistic jobs", 0.60, False, _claim("realistic_jct_below_tiresias")),
    ("average JCT below Optimus, realistic jobs", 0.60, False, _claim("realistic_jct_below_optimus")),
    ("decision at 64 GPUs / 40 jobs, ms", 5.0, True, _size("64/40")),
    ("decision at 1,024 / 640, ms", 100.0, True, _size("1024/640")),
    ("decision at 4,096 / 2,500, ms", 500.0, True, _size("4096/2500")),
    ("decision at 16,384 / 5,000, ms", 1000.0, True, _size("16384/5000")),
    ("quality, worst instance", 0.94, False, _summary("quality_min")),
    ("quality, mean", 0.96, False, _summary("quality_mean")),
    ("quality over the genetic search's, up to 64 GPUs", 0.97, False, _summary("vs_genetic_up_to_64")),
    ("least lead over the genetic search from 128 GPUs", 0.0, False, _summary("least_lead_from_128")),
    ("idle GPUs that a waiting job could use", 0, True, _summary("idle_usable_gpus_max")),
    ("one 160-job workload, CPU s", 10.0, True, lambda results: results["simulate"]["cpu_seconds"]),
    ("fit on 20 observations, ms", 2.0, True, lambda results: results["fit"]["fit_ms_median"]),
    ("best batch for one placement, ms", 0.1, True, lambda results: results["fit"]["best_batch_ms"]),
    ("all 424 placements up to 64 GPUs, ms", 1.0, True, lambda results: results["fit"]["placements_424_ms"]),
    (
        "RMSLE on measured placements, worst application", 0.13, True,
        lambda results: results["fit"]["rmsle_max"],
    ),
    ("noise scale's 95 % interval holds the truth, worst case", 0.9, False, _coverage),
    ("exact mode against plain PyTorch, float64", 1e-12, True, _agent("exact_max_rel_diff_float64")),
    ("exact mode against plain PyTorch, float32", 1e-6, True, _agent("exact_max_rel_diff_float32")),
    ("samples lost", 0, True, _agent("samples_lost")),
    ("samples repeated", 0, True, _agent("samples_repeated")),
    ("resumes that failed after a kill", 0, True, _agent("kill_resume_failures")),
    ("checkpoint pause over our synchronous save", 0.1, True, _agent("checkpoint_pause_ratio")),
    ("... over a bare one by PyTorch, without checksums", None, True, _agent("checkpoint_pause_ratio_plain_dcp")),
    ("adaptive against exact quality, sd, end of interval", 1.0, True, _agent("quality_difference_worst_sd")),
    ("samples at 4 x the initial batch or more", 0.5, False, _agent("quality_share_at_4x")),
    ("optimiser steps, adaptive over exact", 0.6, True, _agent("quality_steps_ratio")),
    ("predicted efficiency, worst error", 0.15, True, _agent("efficiency_worst_error")),
    ("API with 1,000 agents, p99 in ms", 50.0, True, _of("service", "p99_ms")),
    ("API, failed requests", 0, True, _of("service", "errors")),
    ("service at rest, share of a core", 0.01, True, _of("service", "idle_core_fraction")),
    ("... with real replicas that sleep, all processes", None, True, _of("service", "idle_core_fraction_local")),
    ("decisions made with 100 open pages over those without", 0.9, False, _of("service_viewers", "decisions_ratio")),
    ("... due until made, median, ms longer than without", 100.0, True, _of("service_viewers", "decision_later_ms")),
    ("... API p99 in ms", 100.0, True, _of("service_viewers", "p99_ms")),
    ("... failed requests of the pages", 0, True, _of("service_viewers", "viewer_errors")),
    ("page with 10,000 jobs and 1,000 nodes, ms until interactive", 2000.0, True, _of("page", "interactive_ms")),
    ("... longest own task while scrolling, ms", 100.0, True, _of("page", "longest_task_ms")),
    ("... memory of the service at most, MiB", 1024.0, True, _page_memory),
    ("completion time of real jobs, castor over fifo", 0.9, True, _of("local", "castor_over_fifo_mean")),
    ("... castor over pollux, end of the 95 % interval", 1.0, True, _of("local", "castor_over_pollux_upper")),
    ("... worst repeat", 1.05, True, _of("local", "castor_over_pollux_largest")),
    ("`pollux --help` over importing typer and rich", 2.5, True, _of("cli", "help_ratio")),
    ("`pollux ls` over importing typer and rich", 2.5, True, _of("cli", "ls_ratio")),
    ("nodes of Slurm and Ray killed under jobs that went on", 20, False, _of("node_kills", "kills")),
    ("... samples lost or trained twice", 0, True, _of("node_kills", "samples_lost_or_repeated")),
    ("start on a warm Slurm node over a step importing PyTorch", 2.0, True, _of("engines", "slurm_warm_start_ratio")),
    ("start on a warm Ray node over a plain actor", 2.0, True, _of("engines", "ray_warm_start_ratio")),
    ("slowest round over 1,000 Slurm nodes, s", 1.0, True, _of("engines", "slurm_pilots_slowest_round_seconds")),
    ("... without pilots, s", 1.0, True, _of("engines", "slurm_jobs_slowest_round_seconds")),
    ("Slurm's commands in a round, however many jobs", 2, True, _of("engines", "slurm_pilots_commands_per_round")),
    ("... without pilots", 2, True, _of("engines", "slurm_jobs_commands_per_round")),
    ("slowest round over 1,000 Ray nodes, s", 1.0, True, _of("engines", "ray_slowest_round_seconds")),
    ("what Ray's driver is asked in a steady round", 0, True, _of("engines", "ray_orders_per_round")),
    ("calls to Ray in a look of its driver, however many claims", 1, True, _of("engines", "ray_calls_per_look")),
    ("... with CPU slots, some of them waited for", 2, True, _of("engines", "ray_slots_calls_per_look")),
]  # fmt: skip

# Figures that have no bar of their own, told beside the claims.
BESIDE: dict[str, Callable[[Results], Any]] = {
    "viewers_decision_later_p50_ms": _of("service_viewers", "decision_later_ms"),
    "viewers_decision_later_p99_ms": _of("service_viewers", "decision_later_p99_ms"),
}


def table(results: Results) -> Table:
    """Claims, bars and figures."""
    rendered = Table(title="What it must show, and what it shows")
    for column, justify in (("claim", "left"), ("bar", "right"), ("measured", "right"), ("", "left")):
        rendered.add_column(column, justify=justify)  # type: ignore[arg-type]
    for claim, bar, lower, figure in CLAIMS:
        value = figure(results)
        limit = "-" if bar is None else f"{'≤' if lower else '≥'} {bar:g}"
        shown = "-" if value is None else f"{value:.4g}"
        rendered.add_row(claim, limit, shown, verdict(value, bar, lower))
    return rendered


def verdict(value: float | None, bar: float | None, lower: bool) -> str:
    """Whether a figure meets its bar: "met", "MISSED", "not run", or nothing where there is no bar."""
    if value is None:
        return "not run"
    if bar is None:
        return ""
    return "met" if (value <= bar if lower else value >= bar) else "MISSED"


def fairness(results: Results) -> Table | None:
    """The fairness knob, averaged over the tuned workloads that were run."""
    rows = results["reproduce"].get("claims", {}).get("fairness")
    if not rows:
        return None
    rendered = Table(title="Fairness knob p")
    for column in ("p", "avg JCT h", "makespan h", "worst FTF", "worst FTF, mean", "FTF > 1"):
        rendered.add_column(column, justify="right")
    for row in rows:
        rendered.add_row(
            f"{row['fairness']:g}", f"{row['avg_jct_hours']:.3f}", f"{row['makespan_hours']:.2f}",
            f"{row['worst_ftf']:.2f}", f"{row['worst_ftf_mean']:.2f}", f"{row['unfair_fraction']:.0%}",
        )  # fmt: skip
    return rendered


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="about seven minutes")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    flags = (["--quick"] if arguments.quick else []) + ["--seed", str(arguments.seed)]
    names = [name for name in (*SCRIPTS, *MORE) if not (arguments.quick and name in LONG)]
    results = {name: run(name, flags) if name in names else {} for name in (*SCRIPTS, *MORE)}
    console = Console(width=110)
    console.print(table(results))
    knob = fairness(results)
    if knob is not None:
        console.print(knob)
    verdicts = [verdict(figure(results), bar, lower) for _, bar, lower, figure in CLAIMS if bar is not None]
    run_ = sum(each != "not run" for each in verdicts)
    counts = {"claims": len(verdicts), "run": run_, "missed": verdicts.count("MISSED")}
    print(json.dumps({**counts, **{name: figure(results) for name, figure in BESIDE.items()}}))


if __name__ == "__main__":
    main()
