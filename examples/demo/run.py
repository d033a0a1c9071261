"""Five real training jobs share four CPU slots: first scheduled by Pollux, then first come, first served.

    python examples/demo/run.py --output build/demo

The first time, jobs are elastic, and slots and batches move between them as they come and go; the second time each
keeps the slots and the batch that its user chose. A table and the web page show both live, the page at one address
from begin to end; the picture and the figures are saved. It takes about three minutes, longer on a busy machine.
After Ctrl-C picture and figures show what has finished. With --stay the page stays up until Enter is pressed.
"""

import argparse
import contextlib
import json
import math
import shutil
import sys
import time
from pathlib import Path

from cluster import WORKLOAD, OutOfTime, Service, Watched, run
from rich.console import Console
from rich.live import Live
from rich.table import Table

SLOTS = 4
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00")
MARK = "made-by-the-demonstration"


def live_table(title: str, seconds: float, statuses: list[dict]) -> Table:
    """What the service says of its jobs now."""
    used = sum(status["gpus"] for status in statuses)
    table = Table(title=f"{title}: {seconds:.0f} s, {used} of {SLOTS} slots in use", title_justify="left")
    for name, justify in (
        ("job", "left"),
        ("state", "left"),
        ("slots", "left"),
        ("batch", "right"),
        ("efficiency", "right"),
    ):
        table.add_column(name, justify=justify)
    table.add_column("progress", justify="left", min_width=22)
    for status in statuses:
        done = 1.0 if status["state"] == "succeeded" else status["progress"] or 0.0
        table.add_row(
            status["id"],
            status["state"],
            "■" * status["gpus"] + "□" * (SLOTS - status["gpus"]),
            str(status["batch_size"] or ""),
            "" if status["efficiency"] is None else f"{status['efficiency']:.2f}",
            "━" * round(16 * done) + f" {100 * done:.0f} %",
        )
    return table


def watch(
    console: Console, service: Service, title: str, seen: dict[str, Watched], ends_at: float, prefix: str = ""
) -> None:
    """One run of the whole workload, shown as it goes; what is seen of each job goes into `seen`."""
    console.print(f"[bold]{title}[/]: {SLOTS} CPU slots, policy {service.policy}")
    with Live(console=console, refresh_per_second=4, transient=not console.is_terminal) as screen:
        last = [0.0]

        def show(seconds: float, statuses: list[dict]) -> None:
            table = live_table(title, seconds, statuses)
            screen.update(table)
            if not console.is_terminal and seconds - last[0] > 15:
                last[0] = seconds
                console.print(table)

        run(service, WORKLOAD, seen, show, ends_at, prefix)


def both(
    console: Console, folder: Path, compare, stay: bool = False, limit_seconds: float = math.inf
) -> tuple[dict[str, Watched], dict[str, Watched], str]:
    """The workload under pollux and then as its users would fix it; one service, whose page is there all the time.

    `compare` is called with what was seen of both. The third value says why it ended early; empty where it did not.
    """
    ends_at = time.monotonic() + limit_seconds
    pollux: dict[str, Watched] = {}
    fixed: dict[str, Watched] = {}
    early = ""
    with Service(folder, "pollux", SLOTS) as service:
        console.print(f"[bold]web page[/]: {service.url}", soft_wrap=True, highlight=False)
        console.print(
            f"   [bold]token[/]: {service.token} (both hold until the end)\n", soft_wrap=True, highlight=False
        )
        try:
            watch(console, service, "with pollux", pollux, ends_at)
            # The page says "Reconnecting" for a moment, and goes on.
            service.switch("fifo")
            watch(console, service, "first come, first served", fixed, ends_at, "fixed-")
        except OutOfTime as late:
            early = f"both halves did not end within {limit_seconds:.0f} s ({late})"
        except KeyboardInterrupt:
            early = "interrupted"
        compare(pollux, fixed)
        if early:
            console.print(f"{early}: picture and figures show what there was")
        elif stay:
            with contextlib.suppress(EOFError, KeyboardInterrupt):
                console.input(f"done; the page is at {service.url} until you press Enter ")
        else:
            console.print("done; with --stay the page stays up until you press Enter")
        return pollux, fixed, early


def summary(pollux: dict[str, Watched], fixed: dict[str, Watched]) -> dict:
    """Figures of both runs, job by job and on average; the average only where every job has ended in both."""
    jobs = {}
    for name in pollux:
        seen = (("pollux", pollux), ("fifo", fixed))
        jobs[name] = {kind: figures(runs[name]) for kind, runs in seen if name in runs and runs[name].ended is not None}
    result: dict = {"jobs": jobs}
    if jobs and all(len(job) == 2 for job in jobs.values()) and len(jobs) == len(WORKLOAD):
        means = {
            kind: sum(job[kind]["completion_seconds"] for job in jobs.values()) / len(jobs)
            for kind in ("pollux", "fifo")
        }
        result |= {"mean_completion_seconds": means, "ratio": means["pollux"] / means["fifo"]}
    return result


def figures(job: Watched) -> dict:
    """One job of one run in a few numbers."""
    held = [(slots, batch, efficiency) for _, slots, batch, efficiency in job.samples if slots]
    return {
        "state": job.state,
        "completion_seconds": round(job.completion_seconds, 1),
        "slots": "→".join(str(slots) for slots in changes([slots for slots, _, _ in held])),
        "batches": "→".join(str(batch) for batch in changes([batch for _, batch, _ in held if batch])),
        "efficiency": round(sum(entry[2] for entry in held) / max(len(held), 1), 2),
        "accuracy": None if job.accuracy is None else round(job.accuracy, 3),
    }


def changes(values: list[int]) -> list[int]:
    """The values in order, without repetitions."""
    return [value for index, value in enumerate(values) if index == 0 or value != values[index - 1]]


def print_summary(console: Console, figures: dict) -> None:
    """Who got which slots, with what batch, and what came of it."""
    table = Table(title="the same jobs under pollux, and under fifo with fixed sizes", title_justify="left")
    table.add_column("job", no_wrap=True)
    for name in ("slots", "batch", "effic.", "accur.", "done", "fifo", "accur.", "done"):
        table.add_column(name)
    for name, job in figures["jobs"].items():
        ours, theirs = job.get("pollux", {}), job.get("fifo", {})
        table.add_row(name, *cells(ours, "slots", "batches", "efficiency", "accuracy"), done(ours),
                      *cells(theirs, "slots", "accuracy"), done(theirs))  # fmt: skip
    console.print(table)
    means = figures.get("mean_completion_seconds")
    if means:
        console.print(
            f"average completion time: [bold]{means['pollux']:.0f} s[/] with pollux, {means['fifo']:.0f} s with fifo "
            f"and fixed sizes ({figures['ratio']:.2f} times)"
        )


def cells(job: dict, *names: str) -> list[str]:
    """Figures of a job for a table; empty where it has not ended."""
    return [str(job.get(name, "")) for name in names]


def done(job: dict) -> str:
    """How long a job took; empty where it has not ended."""
    return f"{job['completion_seconds']:.0f} s" if job else ""


def draw(pollux: dict[str, Watched], fixed: dict[str, Watched], path: Path) -> None:
    """Slots by job over time in both runs, and the batches of the adaptive one."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(3, 1, figsize=(9, 8), sharex=True, constrained_layout=True)
    for axis, runs, title in (
        (axes[0], pollux, "pollux: elastic slots"),
        (axes[1], fixed, "fifo: the users' fixed sizes"),
    ):
        times = sorted({sample[0] for job in runs.values() for sample in job.samples})
        heights = [[slots_at(job, moment) for moment in times] for job in runs.values()]
        if times:
            axis.stackplot(times, heights, labels=list(runs), colors=COLOURS, step="post")
        axis.set(ylabel="slots", ylim=(0, SLOTS + 0.2), title=title)
        for job, colour in zip(runs.values(), COLOURS, strict=False):
            axis.axvline(job.submitted, color=colour, linestyle=":", linewidth=1)
    if pollux:
        axes[0].legend(
            loc="lower center", bbox_to_anchor=(0.5, 1.12), ncols=len(pollux), fontsize="small", frameon=False
        )
    for (name, job), colour in zip(pollux.items(), COLOURS, strict=False):
        points = [(moment, batch) for moment, slots, batch, _ in job.samples if batch and slots]
        if points:
            axes[2].step(*zip(*points, strict=True), where="post", color=colour, label=name)
    axes[2].set(ylabel="batch (samples)", xlabel="seconds (dotted: a job is submitted)", title="pollux: total batch")
    axes[2].set_yscale("log", base=2)
    axes[2].yaxis.set_major_formatter("{x:.0f}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def slots_at(job: Watched, moment: float) -> int:
    """What a job held at a moment; nothing before it came and after it ended."""
    if job.ended is not None and moment > job.ended:
        return 0
    return next((slots for at, slots, _, _ in reversed(job.samples) if at <= moment), 0)


def fresh_folder(folder: Path) -> Path:
    """A folder of the demonstration's own: what an earlier one left there goes, what is anybody else's is refused."""
    if (folder / MARK).is_file():
        shutil.rmtree(folder)
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SystemExit(f"error: '{folder}' is there already, and is not the demonstration's; give another --output")
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    (folder / MARK).touch()
    return folder


def main() -> None:
    """Run both, show both, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("build/demo"), help="for picture and figures")
    parser.add_argument("--stay", action="store_true", help="keep the page up at the end, until Enter is pressed")
    parser.add_argument(
        "--limit", type=float, default=math.inf, metavar="SECONDS", help="for both halves; default: none"
    )
    chosen = parser.parse_args()
    output = chosen.output.resolve()
    home = fresh_folder(output / "service")
    console = Console()
    console.print(__doc__.strip().splitlines()[0])
    console.print(
        "Computing is stood for by a wait, as on a GPU; gradients, communication, checkpoints and resizes are real.\n"
    )
    began = time.monotonic()

    def compare(pollux: dict[str, Watched], fixed: dict[str, Watched]) -> None:
        result = summary(pollux, fixed)
        print_summary(console, result)
        draw(pollux, fixed, output / "demo.png")
        seconds = time.monotonic() - began
        (output / "summary.json").write_text(json.dumps({**result, "seconds": round(seconds, 1)}, indent=2))
        console.print(f"picture: {output / 'demo.png'}\nfigures: {output / 'summary.json'} ({seconds:.0f} s in all)")

    pollux, fixed, early = both(console, home, compare, chosen.stay, chosen.limit)
    failed = any(job.state != "succeeded" for jobs in (pollux, fixed) for job in jobs.values())
    sys.exit(130 if early == "interrupted" else 1 if early or failed else 0)


if __name__ == "__main__":
    main()
