"""Rounds of the adapters over 1,000 nodes' worth of what real clusters said: part of `engines.py`."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import re
import statistics
import sys
import tempfile
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from measure import timed

from pollux.backends.ray.driver.loop import Driver
from pollux.backends.ray.driver_messages import (
    DriverOrder,
    DriverRequest,
    GrantedMessage,
    HostGoneMessage,
    HostMessage,
    HostReport,
    NodesMessage,
    TakeClaims,
    decode_message,
    encode_line,
)
from pollux.backends.ray.nodes import lending_nodes
from pollux.backends.ray.options import RayOptions
from pollux.backends.ray.provider import RayNodeProvider
from pollux.backends.slurm.commands import SlurmCommands
from pollux.backends.slurm.job_provider import SlurmJobProvider
from pollux.backends.slurm.parse import fold_nodes
from pollux.backends.slurm.pilot_provider import SlurmPilotProvider
from pollux.backends.slurm.script import SlurmOptions

RECORDED = Path(__file__).with_name("recorded")
POLL_SECONDS = 5.0


def measured(engine: str, nodes: int, repeats: int) -> dict[str, Any]:
    """Seconds of the slowest round and of steady ones for each story of an engine, and what is asked of it then."""
    kept = json.loads((RECORDED / f"{engine}.json").read_text())
    copies = math.ceil(nodes / kept["nodes"])
    figures: dict[str, Any] = {f"{engine}_nodes": copies * kept["nodes"], f"{engine}_version": kept["version"]}
    for name, story in kept["stories"].items():
        if engine == "slurm":
            figures |= slurm_rounds(name, story, copies, kept["gpus"], repeats)
        else:
            figures |= ray_rounds(story, copies, repeats)
    return figures


def told(prefix: str, slowest: tuple[float, str], steady: list[float]) -> dict[str, Any]:
    """The figures of one story, which are said, too."""
    usual = statistics.median(steady)
    print(f"{prefix}: slowest round {slowest[0]:.3f} s ('{slowest[1]}'), steady {usual:.3f} s", flush=True)
    return {f"{prefix}_slowest_round_seconds": round(slowest[0], 4), f"{prefix}_round_seconds": round(usual, 4)}


def ask_after(lender: Any, jobs: Mapping[str, Mapping[str, int]]) -> None:
    """What the service asks of its lender in a round: who holds what, who is refused, what there is."""
    for job in jobs:
        lender.held(job)
        lender.refusal(job)
    lender.hosts()
    lender.warnings()


# Slurm


def nth(node: str, copy: int) -> str:
    """The name of a node in one of the copies."""
    name, number = re.fullmatch(r"(\D+)(\d+)", node).groups()  # type: ignore[union-attr]
    return f"{name}{copy * 10 + int(number)}"


def renamed(names: str, copy: int) -> str:
    """The same for a list of Slurm's, such as node[1-2]; what is none stays."""
    found = re.fullmatch(r"([a-z]+)(?:(\d+)|\[([\d,-]+)\])", names)
    if found is None:
        return names
    numbers: list[int] = []
    for part in (found[2] or found[3]).split(","):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return fold_nodes([nth(f"{found[1]}{number}", copy) for number in numbers])


def of_pilot(pilot: str, copy: int) -> str:
    """The id of a batch job in one of the copies."""
    array, _, task = pilot.partition("_")
    return f"{int(array) + 10_000 * copy}_{task}"


class PlayedSlurm:
    """Commands that print what was recorded, so many times, and note that they were run; a pool with the same notes."""

    def __init__(self, folder: Path, copies: int) -> None:
        self.folder, self.pool, self._copies = folder, folder / "pool", copies

    @contextmanager
    def environ(self) -> Iterator[dict[str, str]]:
        """An environment with the commands."""
        commands = self.folder / "bin"
        commands.mkdir()
        played = {"squeue": "cat squeue.txt", "sinfo": "cat sinfo.txt", "sbatch": "echo 9"} | dict.fromkeys(
            ("scancel", "scontrol"), ":"
        )
        for name, text in played.items():
            path = commands / name
            path.write_text(f"#!/bin/sh\ncd {self.folder}\necho {name} >> commands.txt\n{text}\n")
            path.chmod(0o755)
        yield {**os.environ, "PATH": f"{commands}:{os.environ['PATH']}"}

    def show(self, moment: Mapping[str, Any]) -> None:
        """From now on that is so."""
        squeue, sinfo, notes = [], [], {}
        for copy in range(self._copies):
            for line in moment["squeue"].splitlines():
                pilot, state, left, limit, nodes, comment, reason = line.split("|", 6)
                job, at, listed = comment.partition("@")
                comment = f"{job}-{copy}{at}{renamed(listed, copy)}" if at else comment
                squeue.append(
                    "|".join((of_pilot(pilot, copy), state, left, limit, renamed(nodes, copy), comment, reason))
                )
            for line in moment["sinfo"].splitlines():
                node, rest = line.split("|", 1)
                sinfo.append(f"{nth(node.strip(), copy)}|{rest}")
            for name, text in moment["notes"].items():
                pilot, node, what = name.split(".")
                there = node if node == "-" else nth(node, copy)
                notes[f"{of_pilot(pilot, copy)}.{there}.{what}"] = text.replace(f'"{node}"', f'"{there}"')
        (self.folder / "squeue.txt").write_text("\n".join(squeue) + "\n")
        (self.folder / "sinfo.txt").write_text("\n".join(sinfo) + "\n")
        pilots = self.pool / "pilots"
        for name in {path.name for path in pilots.iterdir()} - notes.keys():
            (pilots / name).unlink()
        for name, text in notes.items():
            if not (pilots / name).exists():
                (pilots / name).write_text(text)

    def commands(self) -> list[str]:
        """What was run since the last time."""
        path = self.folder / "commands.txt"
        run = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return run


def slurm_rounds(name: str, story: list[dict[str, Any]], copies: int, gpus: int, repeats: int) -> dict[str, Any]:
    """One story of Slurm's, with pilots or without."""
    now = [0.0]
    with tempfile.TemporaryDirectory(prefix="pollux-engines-") as folder:
        played = PlayedSlurm(Path(folder), copies)
        with played.environ() as environ:
            nodes = str(copies * len(story[0]["nodes"])) if name == "pilots" else "1"
            options = SlurmOptions(
                nodes=nodes, gpus_per_node=gpus, slots=gpus, mode="pilot" if name == "pilots" else "job"
            )
            lender_class = SlurmPilotProvider if name == "pilots" else SlurmJobProvider
            lender = lender_class(played.pool, options, SlurmCommands(environ, 60.0), clock=lambda: now[0])
            lender.queue.folder.prepare(b"secret")
            jobs: dict[str, dict[str, int]] = {}

            def turn() -> None:
                now[0] += POLL_SECONDS
                lender.do_round()
                ask_after(lender, jobs)

            slowest = (0.0, "")
            for moment in story:
                # What ends later than a minute after it began is no failure to begin.
                now[0] += 60.0
                played.show(moment)
                there = jobs_of(moment, copies, gpus)
                for job in jobs.keys() - there.keys():
                    lender.drop(job, lender.held(job))
                    del jobs[job]
                slowest = max(slowest, (timed(turn), moment["event"]))
                for job in there.keys() - jobs.keys():
                    lender.ask(job, there[job])
                    jobs[job] = there[job]
                # A node whose batch job has ended is offered again a moment later.
                turn()
                offered = len({hosted.node.id for hosted in lender.hosts()} - lender.leaving().keys())
                expected = copies * len([*moment["nodes"], *moment["unseen"]])
                assert offered == expected, (name, moment["event"], offered, expected)
                assert all(lender.held(job).keys() == places.keys() for job, places in jobs.items())
            played.commands()
            steady = [timed(turn) for _ in range(repeats)]
            run = played.commands()
    assert set(run) == {"squeue", "sinfo"}, set(run)
    return {**told(f"slurm_{name}", slowest, steady), f"slurm_{name}_commands_per_round": len(run) / repeats}


def jobs_of(moment: Mapping[str, Any], copies: int, gpus: int) -> dict[str, dict[str, int]]:
    """A job of all places of a node on every node whose host is there, and which is not to be left."""
    known = {*moment["nodes"], *moment["unseen"]}
    hosts = {json.loads(text)["node"] for file, text in moment["notes"].items() if file.endswith(".json")} & known
    return {f"job-{nth(node, copy)}": {nth(node, copy): gpus} for copy in range(copies) for node in hosts}


# Ray


class PlayedLink:
    """In place of the driver: keeps what it is told."""

    is_connected, trouble = True, ""

    def __init__(self) -> None:
        self.told: list[DriverRequest] = []

    def send(self, request: DriverRequest) -> None:
        """One request to the driver."""
        self.told.append(request)


def of_ray(ray_id: str, copy: int) -> str:
    """The id of a node in one of the copies; as long as Ray's."""
    return hashlib.sha256(f"{copy} {ray_id}".encode()).hexdigest()[: len(ray_id)]


def ray_rows(moment: Mapping[str, Any], copies: int) -> list[dict[str, Any]]:
    """What `ray.nodes()` returned, so many times."""
    return [
        {**row, "NodeID": of_ray(row["NodeID"], copy)}
        for copy in range(copies)
        for row in moment["rows"]
        if row["Resources"].get("GPU") or not row["Alive"]
    ]


def dead_of(moment: Mapping[str, Any], copies: int) -> set[str]:
    """Ids of the nodes that Ray took for alive when the service knew better."""
    known = {name[-6:] for name in moment["nodes"]}
    ids = [row["NodeID"] for row in moment["rows"] if row["Alive"] and row["NodeID"][-6:] not in known]
    return {of_ray(ray_id, copy) for ray_id in ids for copy in range(copies)}


def ray_jobs(moment: Mapping[str, Any], copies: int) -> dict[str, dict[str, int]]:
    """The jobs that held placement groups, with the nodes of each copy."""
    jobs: dict[str, dict[str, int]] = {}
    for group in moment["groups"]:
        if group["state"] != "CREATED":
            continue
        job, ray_id = group["name"].split(":")[2], group["bundles_to_node_id"]["0"]
        for copy in range(copies):
            row = next(row for row in moment["rows"] if row["NodeID"] == ray_id)
            (node,) = lending_nodes([{**row, "NodeID": of_ray(ray_id, copy)}], None, False)
            places = jobs.setdefault(f"{job}-{copy}", {})
            places[node.name] = places.get(node.name, 0) + 1
    return jobs


def ray_rounds(story: list[dict[str, Any]], copies: int, repeats: int) -> dict[str, Any]:
    """The story of Ray's: every replica has its placement group, and hosts are up as soon as their nodes are."""
    with tempfile.TemporaryDirectory(prefix="pollux-engines-") as folder:
        lender, link = RayNodeProvider(Path(folder), RayOptions()), PlayedLink()
        lender._link, lender._grants._send = link, link.send  # type: ignore[assignment]
        jobs = ray_jobs(story[0], copies)
        up: set[str] = set()

        def look(rows: list[dict[str, Any]], dead: set[str]) -> None:
            seen = lending_nodes(rows, None, False)
            lender._hear(decode_message(encode_line(NodesMessage(tuple(seen), {}))))
            for node in seen:
                if node.ray_id in dead:
                    # By the end of its actor, which is sooner known than what Ray says of the node.
                    lender._hear(HostGoneMessage(node.name, "its host ended"))
                elif node.ray_id not in up:
                    up.add(node.ray_id)
                    lender._hear(HostMessage(node.name, HostReport((node.address, 4000), ())))
            ask_after(lender, jobs)

        slowest = (0.0, "")
        for moment in story:
            rows, dead = ray_rows(moment, copies), dead_of(moment, copies)
            slowest = max(slowest, (timed(functools.partial(look, rows, dead)), moment["event"]))
            assert len(lender.hosts()) == copies * len(moment["nodes"]), moment["event"]
            if not link.told:
                for job, places in jobs.items():
                    lender.ask(job, places)
                for order in [*link.told]:
                    for claim in order.claims if isinstance(order, TakeClaims) else ():
                        lender._hear(GrantedMessage(claim))
                assert all(lender.held(job).keys() == places.keys() for job, places in jobs.items())
        link.told.clear()
        steady = [timed(functools.partial(look, rows, dead)) for _ in range(repeats)]
        orders = len(link.told)
    return {
        **told("ray", slowest, steady),
        "ray_orders_per_round": orders / repeats,
        **ray_calls(rows, repeats, None),
        **ray_calls(rows, repeats, 4),
    }


class CountedRay:
    """As much of Ray as its driver uses, with every call counted that would leave the process."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows
        self.states: dict[str, str] = {}
        self.calls = 0
        self.util = types.SimpleNamespace(placement_group_table=self._table, remove_placement_group=self._counted)
        self.kill = self.wait = self._counted

    def modules(self) -> dict[str, Any]:
        """What the driver looks up by name."""
        strategies = {
            name: lambda *given, **named: None
            for name in ("NodeAffinitySchedulingStrategy", "PlacementGroupSchedulingStrategy")
        }
        return {
            "ray": types.ModuleType("ray"),
            "ray.util": types.ModuleType("ray.util"),
            "ray.util.scheduling_strategies": types.SimpleNamespace(**strategies),
            "ray.util.placement_group": types.SimpleNamespace(placement_group=self._group),
        }

    def nodes(self) -> list[dict[str, Any]]:
        self.calls += 1
        return self._rows

    def remote(self, what: Any) -> Any:
        """A class or function whose calls never answer."""
        future = types.SimpleNamespace(add_done_callback=lambda handle: None)
        called = types.SimpleNamespace(remote=lambda: self._counted() or types.SimpleNamespace(future=lambda: future))
        actor = types.SimpleNamespace(report=called, watch=called, release=called, future=lambda: future)
        return types.SimpleNamespace(
            options=lambda **options: types.SimpleNamespace(remote=lambda *given, **named: self._counted() or actor)
        )

    def _counted(self, *given: Any, **named: Any) -> None:
        self.calls += 1

    def _group(self, bundles: Any, name: str, lifetime: str, bundle_label_selector: Any) -> str:
        """Nine of ten are created at once."""
        self.calls += 1
        self.states[name] = "PENDING" if len(self.states) % 10 == 0 else "CREATED"
        return name

    def _table(self, group: str | None = None) -> dict[str, Any]:
        self.calls += 1
        if group is not None:
            return {"state": self.states[group]}
        return {name: {"name": name, "state": state} for name, state in self.states.items()}


def ray_calls(rows: list[dict[str, Any]], repeats: int, slots: int | None) -> dict[str, Any]:
    """Calls to Ray, and seconds, of a driver's look around with a claim on every node."""
    ray, told = CountedRay(rows), []
    now = [0.0]
    before = {name: sys.modules.get(name) for name in ray.modules()}
    sys.modules.update(ray.modules())
    try:
        order = DriverOrder("ab" * 32, "pollux:s:", slots=slots)
        driver = Driver(ray, order, told.append, lambda: now[0])
        driver.look_around()
        names = [node.name for node in told[0].nodes]
        driver.obey(TakeClaims({f"pollux:s:j:{number}": name for number, name in enumerate(names)}))
        now[0] += 10.0
        for claim in driver.groups.not_granted():
            if slots is None and ray.states[claim] == "CREATED":
                # In the place of its group the played Ray gives its name.
                driver.groups._found(["0"], None, claim, claim)
        driver.look_around()
        assert sum(isinstance(message, GrantedMessage) for message in told) == len(names) - math.ceil(len(names) / 10)
        ray.calls = 0
        seconds = [timed(driver.look_around) for _ in range(repeats)]
    finally:
        for name, module in before.items():
            sys.modules.pop(name) if module is None else sys.modules.update({name: module})
    kind = "ray" if slots is None else "ray_slots"
    return {
        f"{kind}_calls_per_look": ray.calls / repeats,
        f"{kind}_look_seconds": round(statistics.median(seconds), 4),
    }
