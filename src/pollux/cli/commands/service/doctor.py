"""`pollux doctor`: what works on this machine and what is missing, with the command that installs it."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import stat
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from pollux.cli.arguments.options import Json, print_json
from pollux.cli.printing.visible import say
from pollux.core.errors import PolluxError, StoreFailed

__all__ = ["Finding", "doctor", "findings"]

_EXTRAS = {
    "torch": ("torch", "training with pollux.init"),
    "service": ("starlette uvicorn pynvml", "'pollux up' and 'pollux run'"),
    "plot": ("matplotlib", "plots of 'simulate --output' and 'whatif --output'"),
    "lightning": ("lightning", "PyTorch Lightning"),
    "transformers": ("transformers", "Hugging Face Trainer"),
    "tensorboard": ("tensorboard", "receipts in TensorBoard"),
    "ray": ("ray", "'pollux up --backend ray'"),
}
_LOW_DISK_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    """A check's result and `remedy`. If something is `missing`, the machine is unusable; with a `note`, it works."""

    name: str
    level: Literal["ok", "note", "missing"]
    value: str
    remedy: str = ""


Store = Annotated[bool, typer.Option("--store", help="Check every fact and snapshot in the store of this home.")]


def doctor(as_json: Json = False, store: Store = False) -> None:
    """Check what works on this machine and what is missing; ends with 1 if something needed is missing.

    Example: pollux doctor
    """
    found = list(_store_findings() if store else findings())
    usable = all(finding.level != "missing" for finding in found)
    if as_json:
        print_json({"usable": usable, "findings": [asdict(finding) for finding in found]})
    else:
        _print(found)
        say("ready" if usable else "something needed is missing; see above")
    if not usable:
        raise typer.Exit(1)


def _print(found: list[Finding]) -> None:
    from rich.text import Text

    from pollux.cli.display.render import standard_output

    console = standard_output()
    marks = {"ok": ("✓", "green"), "note": ("–", "yellow"), "missing": ("✗", "red")}
    for finding in found:
        line = Text.assemble(marks[finding.level], f" {finding.name:<22} {finding.value}")
        console.print(line, soft_wrap=True)
        if finding.remedy:
            console.print(Text(f"  {'':<22} → {finding.remedy}", style="dim"), soft_wrap=True)


def findings() -> Iterator[Finding]:
    """The results of all checks, in order."""
    yield _python()
    yield from _extras()
    yield _gpus()
    yield _cores()
    yield from _memory()
    yield from _home()
    yield _service()


def _store_findings() -> Iterator[Finding]:
    """Whether the store can be read; a service may run meanwhile."""
    from pollux.store.inspection import inspect_store
    from pollux.wire import home_layout

    path = home_layout.store_file(home_layout.home(os.environ))
    try:
        state = inspect_store(path)
    except StoreFailed as error:
        what, _, remedy = str(error).partition(": ")
        yield Finding("store", "missing", what, remedy)
        return
    facts = f"{state.num_facts} facts, {state.first} to {state.last}" if state.num_facts else "no facts"
    yield Finding("store", "ok", f"{path}: {facts}")
    whole = ", ".join(f"after fact {revision}" for revision in state.snapshots) or "none yet"
    yield Finding("snapshots", "ok", whole)
    for fault in state.faults:
        yield Finding("store", "missing", fault, f"restore a backup of {path.name}, with its -wal file if there is one")


def _python() -> Finding:
    return Finding("Python", "ok", f"{platform.python_version()}, {sys.executable}")


def _extras() -> Iterator[Finding]:
    for extra, (modules, use) in _EXTRAS.items():
        absent = [module for module in modules.split() if importlib.util.find_spec(module) is None]
        command = f"pip install 'pollux-scheduler[{extra}]'"
        if not absent:
            yield Finding(f"extra '{extra}'", "ok", modules.replace(" ", ", "))
        elif absent == ["pynvml"]:
            yield Finding(f"extra '{extra}'", "note", "pynvml is not installed: GPUs are not found", command)
        else:
            level: Literal["note", "missing"] = "missing" if extra == "service" else "note"
            yield Finding(f"extra '{extra}'", level, f"no {', '.join(absent)}", f"for {use}: {command}")


def _gpus() -> Finding:
    import pollux.backends as backends
    from pollux.backends.local import LocalBackend

    missing = backends.available("local")
    if missing is not None:
        return Finding("local backend", "missing", missing)
    try:
        backend = LocalBackend(_temporary_home())
    except PolluxError as error:
        return Finding("GPUs", "note", f"cannot be checked: {error}")
    nodes = backend.inventory()
    kinds = sorted({f"{node.num_gpus} × {node.gpu_type}" for node in nodes if node.gpu_type != "cpu"})
    if kinds:
        return Finding("GPUs", "ok", ", ".join(kinds))
    slots = sum(node.num_gpus for node in nodes)
    why, remedy = backend.no_gpus
    value = f"none found{why and f' ({why})'}; {slots} CPU slots instead"
    return Finding("GPUs", "note", value, remedy or "with an NVIDIA GPU: see what 'nvidia-smi' says")


def _temporary_home() -> Path:
    """A temporary folder for a backend that is only asked for its inventory."""
    import tempfile

    return Path(tempfile.gettempdir()) / f"pollux-doctor-{os.getpid()}"


def _cores() -> Finding:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Finding("CPU cores", "ok", f"{usable} of {os.cpu_count()} usable by this process")


def _memory() -> Iterator[Finding]:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return
    yield Finding("memory", "ok", f"{total / 2**30:.1f} GiB")


def _home() -> Iterator[Finding]:
    from pollux.wire import home_layout

    home = home_layout.home(os.environ)
    existing = next(folder for folder in (home, *home.parents) if folder.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        yield Finding("home", "missing", f"{home} cannot be written", "set POLLUX_HOME to a folder of yours")
        return
    yield Finding("home", "ok", f"{home}{'' if home.exists() else ' (made at first start)'}")
    free = shutil.disk_usage(existing).free
    low = free < _LOW_DISK_BYTES
    yield Finding("disk", "note" if low else "ok", f"{free / 2**30:.1f} GiB free", "free some" if low else "")
    token = home_layout.token_file(home)
    if token.exists():
        mode = stat.S_IMODE(token.stat().st_mode)
        if mode & 0o077:
            yield Finding("token", "missing", f"{token} is open to others (mode {mode:o})", f"chmod 600 {token}")
        else:
            yield Finding("token", "ok", f"{token}, readable by you only")


def _service() -> Finding:
    from pollux.cli.client.client import connect

    try:
        client = connect(timeout=5.0)
        status = client.get("/v1/status")
    except PolluxError as error:
        return Finding("service", "note", str(error))
    return Finding("service", "ok", f"{client.url}, version {status['version']}, policy {status['policy']}")
