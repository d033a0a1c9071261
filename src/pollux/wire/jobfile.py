"""Reads job files, and requests with the same keys as JSON, into a `JobRequest`, and writes them.

`check_paths` checks whether folder and command exist on this machine.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pollux.core.errors import InvalidInput, TooLarge
from pollux.wire._entry import Entry, Origin
from pollux.wire._fields import READERS, RUN_REMEDY, is_job_name, legal_name, read_checkpoint, read_run
from pollux.wire._yaml import read_yaml
from pollux.wire.codec import MAX_BODY_BYTES
from pollux.wire.job import BARE_PYTHON, JobRequest

__all__ = [
    "JOB_KEYS",
    "check_paths",
    "is_elsewhere",
    "is_job_name",
    "job_to_mapping",
    "legal_name",
    "parse_job",
    "read_job_file",
]

JOB_KEYS = (
    "name",
    "run",
    "gpus",
    "batch_size",
    "resources",
    "workdir",
    "env",
    "priority",
    "queue",
    "preemptible",
    "after",
    "time_limit",
    "retries",
    "grace",
    "on_resize",
    "checkpoint",
    "group",
    "kind",
    "deadline",
)
"""Every key of a job file; only `run` is required."""

_BELONG = {
    key: f"write it as {mapping}: {{{key}: ...}}"
    for mapping, keys in {
        "batch_size": ("initial", "max", "per_gpu_max"),
        "resources": ("cpus", "memory", "gpu_type"),
        "checkpoint": ("dir", "every", "keep"),
    }.items()
    for key in keys
}
_FILE_NAMES_THAT_SAY_NOTHING = ("job", "pollux", "stdin", "-")


def read_job_file(path: str | os.PathLike[str]) -> JobRequest:
    """The job of a YAML 1.2 file. Relative folders are relative to its folder; the default name is the file's."""
    name = os.fspath(path)
    value, origin = read_yaml(_read_text(name), name)
    if value is None:
        raise InvalidInput(f"{name} is empty: {RUN_REMEDY.replace('give', 'give at least run:')}")
    stem = Path(name).stem
    fallback = None if stem in _FILE_NAMES_THAT_SAY_NOTHING else stem
    return _parse(Entry(value, origin), os.path.dirname(os.path.abspath(name)), fallback)


def parse_job(mapping: object, workdir: str | None = None, where: str = "job", name: str | None = None) -> JobRequest:
    """The job of a mapping with the keys of the job file, such as the body of a request.

    Folders are relative to `workdir`; None: the mapping must name an absolute one. Errors begin with `where`. A job
    without a name gets `name`, or the name of its command.
    """
    base = None if workdir is None else os.path.abspath(workdir)
    return _parse(Entry(mapping, Origin(where)), base, name)


def job_to_mapping(request: JobRequest) -> dict[str, Any]:
    """The job as a mapping for `parse_job`, of plain JSON values; keys without a value are left out."""
    low, high = request.min_gpus, request.max_gpus
    found: dict[str, Any] = {
        "name": request.name,
        "run": list(request.run),
        "gpus": low if low == high else f"{low}..{high}",
        "batch_size": _given(
            initial=request.batch_size.initial, max=request.batch_size.max, per_gpu_max=request.batch_size.per_gpu_max
        ),
        "resources": _given(
            cpus=request.resources.cpus or None,
            memory=request.resources.memory_bytes or None,
            gpu_type=list(request.resources.gpu_types) or None,
            mixed_types=request.resources.mixed_types or None,
        ),
        "workdir": request.workdir,
        "env": dict(request.env),
        "priority": request.priority,
        "queue": request.queue,
        "preemptible": request.preemptible,
        "after": list(request.after),
        "time_limit": request.time_limit_seconds,
        "retries": request.retries,
        "grace": request.grace_seconds,
        "on_resize": request.on_resize,
        "group": request.group or None,
        "kind": request.kind or None,
        "deadline": request.deadline,
        "checkpoint": _given(
            dir=request.checkpoint.dir, every=request.checkpoint.every_seconds, keep=request.checkpoint.keep
        ),
    }
    return {key: value for key, value in found.items() if value is not None and value not in ({}, [])}


def check_paths(request: JobRequest) -> tuple[str, ...]:
    """An error for each part that this machine lacks: folder, command, Python script."""
    if not os.path.isdir(request.workdir):
        what = "is not a folder" if os.path.exists(request.workdir) else "does not exist"
        return (f"{request.name}: workdir {request.workdir} {what}: create it, or name another",)
    command = request.run[0]
    found = [] if _finds(command, request) else [f"{request.name}: run: {_not_found(command, request)}"]
    script = _script(request)
    if script and not os.path.isfile(os.path.join(request.workdir, script)):
        found.append(f"{request.name}: run: there is no {script} in {request.workdir}: check the path, or set workdir")
    return tuple(found)


def is_elsewhere(request: JobRequest) -> bool:
    """Whether the job's folder is on another machine: it is not here, or lacks the command or script of the job."""
    if not os.path.isdir(request.workdir):
        return True
    command, script = request.run[0], _script(request)
    run = [command] * ("/" in command) + [script] * bool(script)
    return not all(os.path.isabs(name) or os.path.exists(os.path.join(request.workdir, name)) for name in run)


def _script(request: JobRequest) -> str:
    """The script of a Python command; empty if there is none."""
    script = request.run[1] if len(request.run) > 1 else ""
    return script if os.path.basename(request.run[0]).startswith("python") and script.endswith(".py") else ""


def _given(**values: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _read_text(name: str) -> str:
    try:
        with open(name, "rb") as file:
            content = file.read(MAX_BODY_BYTES + 1)
    except FileNotFoundError as error:
        raise InvalidInput(f"{name}: there is no such file: check the path") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidInput(f"{name} cannot be read: {reason}: give a readable file") from error
    if len(content) > MAX_BODY_BYTES:
        raise TooLarge(f"{name} has more than {MAX_BODY_BYTES} bytes: a job file is smaller; is it another file?")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise InvalidInput(f"{name} line {line}: byte {error.start} is not UTF-8: save it as UTF-8") from error


def _parse(job: Entry, base: str | None, fallback: str | None) -> JobRequest:
    keys = job.keys(JOB_KEYS, "give a mapping with the keys of a job file, such as run: python train.py", _BELONG)
    if "run" not in keys:
        raise InvalidInput(f"{job.label}: run is missing: {RUN_REMEDY}")
    given = {key: job.at(key) for key in keys}
    run = read_run(given["run"])
    fields: dict[str, Any] = {"run": run, "name": legal_name(_last_part(run) if fallback is None else fallback)}
    fields["workdir"] = _workdir(given.get("workdir"), base, job.label)
    for key, entry in given.items():
        if key in READERS:
            fields.update(READERS[key](entry))
    if "checkpoint" in given:
        fields["checkpoint"] = read_checkpoint(given["checkpoint"], fields["workdir"], expand=base is not None)
    request = JobRequest(**fields)
    _check_together(request, given)
    return request


def _check_together(request: JobRequest, given: Mapping[str, Entry]) -> None:
    if request.on_resize == "never" and request.min_gpus != request.max_gpus:
        given["on_resize"].refuse(
            f"such a job keeps one number of GPUs, and gpus is {request.min_gpus}..{request.max_gpus}; "
            "give one number for gpus, or on_resize restart"
        )
    if request.name in request.after:
        given["after"].refuse(f"the job would wait for itself; take '{request.name}' out")


def _last_part(run: tuple[str, ...]) -> str:
    """The name for a command: of its script or module if it has one, else of the program."""
    if run[:2] == ("sh", "-c") and len(run) == 3:
        run = (*run[2].split(), "")
    scripts = [word for word in run if word.endswith((".py", ".sh"))]
    modules = [run[index + 1] for index, word in enumerate(run[:-1]) if word == "-m"]
    return Path((scripts + modules + [run[0]])[0]).name.removesuffix(".py").removesuffix(".sh")


def _workdir(entry: Entry | None, base: str | None, label: str) -> str:
    remedy = "give a folder" if base is not None else "give an absolute folder"
    if entry is None:
        if base is None:
            raise InvalidInput(f"{label}: workdir is missing: {remedy}")
        return os.path.normpath(base)
    text = entry.text(remedy)
    if base is not None:
        text = os.path.join(base, os.path.expanduser(text))
    if not os.path.isabs(text):
        entry.refuse(remedy)
    return os.path.normpath(text)


def _finds(command: str, request: JobRequest) -> bool:
    if "/" in command:
        path = os.path.join(request.workdir, command)
        return os.path.isfile(path) and os.access(path, os.X_OK)
    searched = request.env.get("PATH")
    if command in BARE_PYTHON and searched is None:
        return True
    import shutil  # which takes a while to load, and only submitters need it

    beside = os.path.dirname(sys.executable)
    return shutil.which(command, path=searched) is not None or shutil.which(command, path=beside) is not None


def _not_found(command: str, request: JobRequest) -> str:
    path = os.path.join(request.workdir, command)
    if "/" in command and os.path.isdir(path):
        return f"{command} is a folder, not a command: name a program in it"
    if not os.path.isfile(path):
        place = request.workdir if "/" in command else "PATH"
        return f"there is no command {command} on {place}: check its spelling, or give its path"
    if command.endswith(".py"):
        return f"{command} is a script, not a command: write python {command}"
    if not os.access(path, os.X_OK):
        return f"{command} may not be executed: chmod +x it, or name the program that runs it"
    return f"{command} is in {request.workdir}, which is not searched: write ./{command}"
