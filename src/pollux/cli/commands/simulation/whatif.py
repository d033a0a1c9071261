"""`pollux whatif`: replays the service's history under other cluster sizes and policies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pollux.cli.arguments.options import complete_policies, print_json, whole
from pollux.cli.arguments.options import trigger as read_trigger
from pollux.cli.printing.visible import say
from pollux.core.errors import InvalidInput

if TYPE_CHECKING:
    from pollux.sim import SimulationSettings, Workload

__all__ = ["node_counts", "whatif"]


def whatif(
    nodes: Annotated[
        str | None,
        typer.Option(
            metavar="+N|-N|N", help="Nodes to add, to remove or in all, such as +2, -1 or 6; several with commas."
        ),
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            "--policy",
            metavar="NAMES",
            autocompletion=complete_policies,
            help="Comma-separated names; results are compared to the first.",
        ),
    ] = "castor",
    history: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A file of 'pollux history export'; by default the service's own history."),
    ] = None,
    trigger: Annotated[
        Any, typer.Option(metavar="rounds|events", parser=read_trigger, help="When to decide.")
    ] = "events",
    workers: Annotated[
        int | None, typer.Option(metavar="N", parser=whole(1), help="Processes; by default one per CPU.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for plots, results.json and report.html.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the table.")] = False,
) -> None:
    """Replay this cluster's own history under another size or policy, and compare it with the present one.

    Example: pollux whatif --nodes +2 --policy pollux,tiresias
    """
    from pollux.cli.commands.cluster.history import history_lines
    from pollux.cli.commands.simulation.simulate import use_one_thread

    use_one_thread()
    from pollux.sim import SimulationSettings
    from pollux.sim.workloads.history import read_history

    past = read_history(history if history is not None else list(history_lines()))
    for reason in past.skipped:
        say(f"left out: {reason}", err=True)
    if not past.workload.jobs:
        raise InvalidInput("the history holds no job that can be replayed; let some jobs finish or report first")
    settings = SimulationSettings(
        num_nodes=past.num_nodes,
        gpus_per_node=past.gpus_per_node,
        trigger=trigger,
        max_gpus_per_job=2**20,
        resize_seconds=past.resize_seconds,
    )
    sizes = node_counts(nodes, past.num_nodes)
    runs = []
    missing: list[list[str]] = []
    for size in sizes:
        workload, left_out = past.on(size, past.gpus_per_node)
        for reason in left_out:
            say(f"left out with {size} nodes: {reason}", err=True)
        if not workload.jobs:
            raise InvalidInput(f"--nodes: none of the jobs can run on {size} nodes of {past.gpus_per_node} GPUs")
        runs.append((replace(workload, name=f"{size}-nodes"), replace(settings, num_nodes=size)))
        missing.append(list(left_out))
    _compare(runs, policy, past.applications, workers, output, as_json, list(past.skipped), missing)


def node_counts(asked: str | None, now: int) -> list[int]:
    """The sizes to simulate: the present one, then those that words such as `+2`, `-1` or `6` name."""
    sizes = [now]
    for word in (asked or "").split(","):
        word = word.strip()
        if not word:
            continue
        try:
            size = now + int(word) if word[0] in "+-" else int(word)
        except ValueError:
            size = 0
        if not 1 <= size <= 100_000:
            raise InvalidInput(f"--nodes is '{word}' with {now} now: give +2, -1 or 6, so that at least 1 is left")
        if size not in sizes:
            sizes.append(size)
    return sizes


def _title(size: int, is_now: bool) -> str:
    return f"{size} node{'s' * (size != 1)}" + (", as it was" if is_now else "")


def _compare(
    runs: list[tuple[Workload, SimulationSettings]],
    policy: str,
    applications: Any,
    workers: int | None,
    output: Path | None,
    as_json: bool,
    skipped: list[str],
    missing: list[list[str]],
) -> None:
    from pollux.cli.commands.simulation.simulate import Outputs, simulate_together
    from pollux.cli.display.render import print_table, results_table, standard_output
    from pollux.sim import check_runs, choose_policies

    policies = choose_policies([name.strip() for name in policy.split(",") if name.strip()], {})
    results: list[dict[str, Any]] = []
    documents: list[dict[str, Any]] = []
    for (workload, settings), left_out in zip(runs, missing, strict=True):
        size = settings.num_nodes
        folder = output if output is None or len(runs) == 1 else output / workload.name
        check_runs([workload], policies, applications, settings)
        document = simulate_together([workload], policies, applications, settings, "history", workers, Outputs(folder))
        title = _title(size, not documents)
        documents.append({"nodes": size, "left_out": left_out, **document})
        results += [{**result, "workload": title} for result in document["results"]]
    if as_json:
        print_json({"runs": documents, "left_out": skipped})
        return
    console = standard_output()
    print_table(console, results_table(results, console.width, means=False))
    if output is not None:
        console.print(f"reports: {output}", markup=False, soft_wrap=True)
