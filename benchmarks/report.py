"""Write the tables of docs/reproduction.md from benchmarks/results: `python benchmarks/report.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from measure import RESULTS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reproduction.md"
BEGIN, END = "<!-- tables: benchmarks/report.py -->", "<!-- end of tables -->"


def load(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return result


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]


def setting(row: dict[str, Any]) -> str:
    parts = []
    if row["interval_seconds"] != 60:
        parts.append(f"every {row['interval_seconds']:g} s")
    if not row["avoid_interference"]:
        parts.append(f"interference {row['interference']:g}, not avoided")
    return ", ".join(parts)


def comparison(rows: list[dict[str, Any]]) -> list[str]:
    """Everything that has a published value beside it."""
    order = {"tiresias": 0, "optimus-oracle": 1, "pollux-genetic": 2, "pollux": 3}
    chosen = sorted(
        (row for row in rows if row["published_jct_hours"] is not None),
        key=lambda r: (order[r["policy"]], not r["avoid_interference"], r["interval_seconds"] != 60, r["workload"],
                       r["interval_seconds"], r["interference"]),
    )  # fmt: skip
    return table(
        ["policy", "workload", "setting", "avg JCT h", "published", "ratio"],
        [
            [f"`{r['policy']}`", r["workload"], setting(r), f"{r['avg_jct_hours']:.4f}",
             f"{r['published_jct_hours']:.4f}", f"{r['ratio']:.4f}"]
            for r in chosen
        ],
    )  # fmt: skip


def policies(rows: list[dict[str, Any]]) -> list[str]:
    """The policies beside each other in the published world."""
    plain = [
        r for r in rows
        if r["interval_seconds"] == 60 and not r["interference"] and r["avoid_interference"] and r["fairness"] == -1
    ]  # fmt: skip
    return table(
        ["workload", "policy", "avg JCT h", "p99 JCT h", "makespan h", "restarts", "GPUs in use", "worst FTF"],
        [
            [r["workload"], f"`{r['policy']}`", f"{r['avg_jct_hours']:.3f}", f"{r['p99_jct_hours']:.2f}",
             f"{r['makespan_hours']:.2f}", f"{r['restarts_per_job']:.1f}", f"{r['utilization']:.0%}",
             f"{r['worst_ftf']:.2f}"]
            for r in sorted(plain, key=lambda r: (r["workload"], r["policy"]))
        ],
    )  # fmt: skip


def fairness(claims: dict[str, Any]) -> list[str]:
    return table(
        ["p", "avg JCT h", "makespan h", "worst FTF", "mean of the worst FTFs", "jobs with FTF > 1"],
        [
            [f"{r['fairness']:g}", f"{r['avg_jct_hours']:.3f}", f"{r['makespan_hours']:.2f}", f"{r['worst_ftf']:.2f}",
             f"{r['worst_ftf_mean']:.2f}", f"{r['unfair_fraction']:.0%}"]
            for r in claims["fairness"]
        ],
    )  # fmt: skip


def outcome(claims: dict[str, Any]) -> str:
    percent = {name: f"{value:.1%}" for name, value in claims.items() if isinstance(value, float)}
    return (
        f"Over the tuned workloads 1, 3 and 6 `pollux` has an average JCT {percent['jct_below_tiresias']} below "
        f"Tiresias and {percent['jct_below_optimus']} below Optimus, and makespans "
        f"{percent['makespan_below_tiresias']} and {percent['makespan_below_optimus']} shorter. On workload 6 with "
        f"realistic requests, which Pollux does not read, it is {percent['realistic_jct_below_tiresias']} and "
        f"{percent['realistic_jct_below_optimus']} below them."
    )


def quality(allocate: dict[str, Any]) -> str:
    summary = allocate["summary"]
    return (
        f"Quality (fitness over the upper bound) is {summary['quality_min']:.3f} at worst and "
        f"{summary['quality_mean']:.3f} on average over {len(allocate['sizes'])} instances; "
        f"{summary['vs_genetic_up_to_64']:.2f} times that of the genetic search over {summary['vs_genetic_snapshots']} "
        f"snapshots of up to 64 GPUs, and above it by at least {summary['least_lead_from_128']:.3f} on every one from "
        "128 GPUs up."
    )


def speed(fit: dict[str, Any], simulate: dict[str, Any]) -> str:
    return (
        f"One published workload of 160 jobs takes {simulate['cpu_seconds']:.1f} CPU seconds (the published simulator: "
        f"{simulate['published_cpu_seconds']:.0f}). A fit to 20 observations takes {fit['fit_ms_median']:.2f} ms (with "
        f"L-BFGS-B and the same gradient {fit['reference_fit_ms_median']:.1f}), the best batch of a placement "
        f"{fit['best_batch_ms']:.3f} ms, that of all 424 placements {fit['placements_424_ms']:.2f} ms. The throughput "
        f"model fits the measured placements with an RMSLE of at most {fit['rmsle_max']:.3f}."
    )


def text() -> str:
    reproduce, allocate = load("reproduce"), load("allocate")
    sizes = ("64/40", "1024/640", "4096/2500", "16384/5000")
    decisions = [[size, f"{allocate['summary']['decision_ms_max'][size]:.1f} ms"] for size in sizes]
    parts = [
        [BEGIN, "", f"Measured on {reproduce['date']}: {reproduce['hardware']}.", ""],
        ["### Against the published averages", "", *comparison(reproduce["rows"])],
        ["### The policies beside each other", "", *policies(reproduce["rows"])],
        [outcome(reproduce["claims"]), ""],
        ["### The fairness knob", "", "Means over workloads 1, 3 and 6 under `pollux`:", ""],
        fairness(reproduce["claims"]),
        ["### Speed and quality", "", "Slowest case of each size, process CPU time from snapshot to checked plan:", ""],
        table(["GPUs/jobs", "decision"], decisions),
        [quality(allocate), "", speed(load("fit"), load("simulate")), "", END],
    ]
    return "\n".join(line for part in parts for line in part)


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    PAGE.write_text(before + text() + after, encoding="utf-8")
    print(f"wrote {PAGE.name}")


if __name__ == "__main__":
    main()
