"""Five real training jobs share four CPU slots: first scheduled by Pollux, then first come, first served.

    python examples/demo/run.py --output build/demo

The first time, jobs are elastic, and slots and batches move between them as they come and go; the second time each
keeps the slots and the batch that its user chose. A table and the web page show both live, the page at one address
from begin to end; the picture and the figures are saved. It ends by itself within three minutes; with --stay the page
stays up until Enter is pressed.
"""

import argparse
import contextlib
import json
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
# For both halves, from the service's start on: with the summary, the picture and its end that makes three minutes.
LIMIT_SECONDS = 170.0
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
    console: Console, service: Service, title: str, prefix: str = "", limit_seconds: float = LIMIT_SECONDS
) -> dict[str, Watched]:
    """One run of the whole workload, shown as it goes."""
    console.print(f"[bold]{title}[/]: {SLOTS} CPU slots, policy {service.policy}")
    with Live(console=console, refresh_per_second=4, transient=not console.is_terminal) as screen:
        last = [0.0]

        def show(seconds: float, statuses: list[dict]) -> None:
            table = live_table(title, seconds, statuses)
            screen.update(table)
            if not console.is_terminal and seconds - last[0] > 15:
                last[0] = seconds
                console.print(table)

        return run(service, WORKLOAD, show, limit_seconds, prefix)


def both(
    console: Console, folder: Path, compare, stay: bool = False, limit_seconds: float = LIMIT_SECONDS
) -> tuple[dict[str, Watched], dict[str, Watched]]:
    """The workload under pollux and then as its users would fix it; one service, whose page is there all the time."""
    ends_at = time.monotonic() + limit_seconds
    with Service(folder, "pollux", SLOTS) as service:
        console.print(f"[bold]web page[/]: {service.url}", soft_wrap=True, highlight=False)
        console.print(
            f"   [bold]token[/]: {service.token} (both hold until the end)\n", soft_wrap=True, highlight=False
        )
        try:
            pollux = watch(console, service, "with pollux", "", ends_at - time.monotonic())
            # The page says "Reconnecting" for a moment, and goes on.
            service.switch("fifo")
            fixed = watch(console, service, "first come, first served", "fixed-", ends_at - time.monotonic())
        except OutOfTime as late:
            raise SystemExit(
                f"error: both halves did not end within {limit_seconds:.0f} s ({', '.join(late.left)}): "
                "this machine is too slow or too busy for that; end what else runs here, or give --limit SECONDS"
            ) from None
        compare(pollux, fixed)
        if stay:
            with contextlib.suppress(EOFError, KeyboardInterrupt):
                console.input(f"done; the page is at {service.url} until you press Enter ")
        else:
            console.print("done; with --stay the page stays up until you press Enter")
        return pollux, fixed


def summary(pollux: dict[str, Watched], fixed: dict[str, Watched]) -> dict:
    """Figures of both runs, job by job and on average."""
    jobs = {}
    for name in pollux:
        jobs[name] = {kind: figures(runs[name]) for kind, runs in (("pollux", pollux), ("fifo", fixed))}
    means = {
        kind: sum(job[kind]["completion_seconds"] for job in jobs.values()) / len(jobs) for kind in ("pollux", "fifo")
    }
    return {"jobs": jobs, "mean_completion_seconds": means, "ratio": means["pollux"] / means["fifo"]}


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
        ours, theirs = job["pollux"], job["fifo"]
        table.add_row(
            name, ours["slots"], ours["batches"], str(ours["efficiency"]), str(ours["accuracy"]),
            f"{ours['completion_seconds']:.0f} s", theirs["slots"], str(theirs["accuracy"]),
            f"{theirs['completion_seconds']:.0f} s",
        )  # fmt: skip
    console.print(table)
    means = figures["mean_completion_seconds"]
    console.print(
        f"average completion time: [bold]{means['pollux']:.0f} s[/] with pollux, {means['fifo']:.0f} s with fifo and "
        f"fixed sizes ({figures['ratio']:.2f} times)"
    )


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
        axis.stackplot(times, heights, labels=list(runs), colors=COLOURS, step="post")
        axis.set(ylabel="slots", ylim=(0, SLOTS + 0.2), title=title)
        for job, colour in zip(runs.values(), COLOURS, strict=False):
            axis.axvline(job.submitted, color=colour, linestyle=":", linewidth=1)
    axes[0].legend(loc="lower center", bbox_to_anchor=(0.5, 1.12), ncols=len(pollux), fontsize="small", frameon=False)
    for (name, job), colour in zip(pollux.items(), COLOURS, strict=False):
        points = [(moment, batch) for moment, slots, batch, _ in job.samples if batch and slots]
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
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, metavar="SECONDS", help="for both halves")
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

    runs = both(console, home, compare, chosen.stay, chosen.limit)
    sys.exit(0 if all(job.state == "succeeded" for jobs in runs for job in jobs.values()) else 1)


if __name__ == "__main__":
    main()
