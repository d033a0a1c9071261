"""Checks the keys of a job file one by one, and turns their values into fields of a `JobRequest`."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, get_args

from pollux.core.errors import InvalidInput, choices
from pollux.storage.address import address_fault, is_address, store_address
from pollux.wire._entry import Entry, shown
from pollux.wire.environment import TORCHRUN_VARIABLES
from pollux.wire.job import BatchSizes, CheckpointRequest, OnResize, Priority, Resources
from pollux.wire.quantities import parse_duration, parse_gpus, parse_size

RUN_REMEDY = "give a command such as python train.py, or a list of its words"

_NAME = re.compile(r"[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?", re.ASCII)
_NAME_REMEDY = "give 1 to 63 of a-z 0-9 . _ - that begin and end with a letter or digit"
_JOB_ID = re.compile(r"[a-z0-9]([a-z0-9._-]{0,70}[a-z0-9])?", re.ASCII)
_GPU_TYPE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._ -]{0,61}[A-Za-z0-9])?", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}", re.ASCII)
_SHELL_SYNTAX = re.compile(r"[|&;<>$`*?()\n]|^\s*[A-Za-z_]\w*=|(?:^|\s)~")

_MAX_BATCH = 10**9
_MAX_RETRIES = 100
_MAX_GRACE_SECONDS = 3600.0
_MAX_CPUS = 100_000.0
_SHORTEST_SECONDS = 1.0
# The year 5138; larger numbers are not seconds since 1970.
_LATEST = 1e11


def is_job_name(name: str) -> bool:
    """Whether this may name a job or a queue: 1 to 63 of a-z 0-9 . _ - between letters or digits."""
    return _NAME.fullmatch(name) is not None


def legal_name(text: str) -> str:
    """A legal job name from any text, or `job`."""
    plain = re.sub(r"[^a-z0-9._-]+", "-", text[:200].lower())
    return plain.strip("-._")[:63].strip("-._") or "job"


def read_run(entry: Entry) -> tuple[str, ...]:
    """The command as a list of words; a string with shell syntax is run by `sh -c`."""
    if isinstance(entry.value, list | tuple):
        words = tuple(item.word("give words as strings or numbers") for item in entry.items(RUN_REMEDY))
        if not words or not words[0].strip():
            entry.refuse(RUN_REMEDY)
        return words
    text = entry.text(RUN_REMEDY).strip()
    if _SHELL_SYNTAX.search(text):
        return ("sh", "-c", text)
    try:
        words = tuple(shlex.split(text))
    except ValueError:
        entry.refuse("a quote or backslash is not closed; close it, or give a list of words")
    if not words or not words[0].strip():
        entry.refuse(RUN_REMEDY)
    return words


def read_checkpoint(entry: Entry, workdir: str, expand: bool) -> CheckpointRequest:
    """The checkpoint settings; the folder is relative to `workdir`. With `expand`, a leading ~ is the user's home."""
    remedy = "give a mapping such as {dir: ./ckpt, every: 10min, keep: 2}"
    keys = entry.keys(("dir", "every", "keep"), remedy)
    folder = every = keep = None
    if "dir" in keys:
        text = entry.at("dir").text("give a folder")
        if is_address(text):
            if fault := address_fault(text):
                entry.at("dir").refuse(fault)
            folder = store_address(text)
        else:
            folder = os.path.normpath(os.path.join(workdir, os.path.expanduser(text) if expand else text))
    if "every" in keys:
        every = _duration(entry.at("every"), low=_SHORTEST_SECONDS)
    if "keep" in keys:
        keep = entry.at("keep").integer(1, 1000, "give a number from 1 to 1000")
    return CheckpointRequest(folder, every, keep)


def _duration(entry: Entry, low: float = 0.0, high: float | None = None) -> float:
    if entry.value is None:
        entry.refuse("give a time such as 10min")
    if high is None:
        return parse_duration(entry.value, entry.label, low)
    return parse_duration(entry.value, entry.label, low, high)


def _name(entry: Entry) -> dict[str, Any]:
    name = entry.text(_NAME_REMEDY)
    if not is_job_name(name):
        entry.refuse(f"{_NAME_REMEDY}, such as {legal_name(name)}")
    return {"name": name}


def _gpus(entry: Entry) -> dict[str, Any]:
    spelling = entry.spelling
    if spelling is not None and ":" in spelling:
        entry.refuse(f'older YAML reads that as a time: quote it, "{spelling}", or write {spelling.replace(":", "..")}')
    if entry.value is None:
        entry.refuse("give a number such as 4, or a range such as 1..16")
    low, high = parse_gpus(entry.value, entry.label)
    return {"min_gpus": low, "max_gpus": high}


def _batch_size(entry: Entry) -> dict[str, Any]:
    remedy = f"give a whole number of samples from 1 to {_MAX_BATCH}"
    if isinstance(entry.value, int):
        return {"batch_size": BatchSizes(initial=entry.integer(1, _MAX_BATCH, remedy))}
    keys = entry.keys(
        ("initial", "max", "per_gpu_max"), "give a number, or {initial: 128, max: 4096, per_gpu_max: 512}"
    )
    sizes = BatchSizes(**{key: entry.at(key).integer(1, _MAX_BATCH, remedy) for key in keys})
    if sizes.initial is not None and sizes.max is not None and sizes.initial > sizes.max:
        entry.at("max").refuse(f"it is below initial, which is {sizes.initial}; raise it, or lower initial")
    return {"batch_size": sizes}


def _resources(entry: Entry) -> dict[str, Any]:
    keys = entry.keys(("cpus", "memory", "gpu_type", "mixed_types"), "give a mapping such as {cpus: 4, memory: 16GiB}")
    fields: dict[str, Any] = {}
    if "cpus" in keys:
        fields["cpus"] = entry.at("cpus").number(0.0, _MAX_CPUS, f"give CPUs for each GPU, 0 to {_MAX_CPUS:g}")
    if "memory" in keys:
        memory = entry.at("memory")
        fields["memory_bytes"] = parse_size(memory.value, memory.label)
    if "gpu_type" in keys:
        remedy = "give a type such as h100, or a list of types"
        types = entry.at("gpu_type").one_or_more(remedy)
        fields["gpu_types"] = _without_repeats([_matching(item, _GPU_TYPE, remedy) for item in types], types)
    if "mixed_types" in keys:
        fields["mixed_types"] = entry.at("mixed_types").boolean("give true or false")
    return {"resources": Resources(**fields)}


def _matching(entry: Entry, pattern: re.Pattern[str], remedy: str) -> str:
    text = entry.text(remedy)
    return text if pattern.fullmatch(text) else entry.refuse(remedy)


def _without_repeats(names: list[str], entries: list[Entry]) -> tuple[str, ...]:
    seen: set[str] = set()
    for name, entry in zip(names, entries, strict=True):
        if name in seen:
            entry.refuse("it is given twice; give it once")
        seen.add(name)
    return tuple(names)


def _env(entry: Entry) -> dict[str, Any]:
    if not isinstance(entry.value, Mapping):
        entry.refuse("give a mapping such as {SEED: 1}")
    found = {}
    for key in entry.value:
        if not isinstance(key, str) or not _VARIABLE.fullmatch(key):
            raise InvalidInput(f"{entry.label}: {shown(key)} is not a name: give letters, digits and _")
        below = entry.at(key)
        if key in TORCHRUN_VARIABLES or key.startswith(("POLLUX_", "TORCHELASTIC_")):
            raise InvalidInput(f"{below.label} is set by Pollux for each replica: take it out")
        found[key] = below.word("give a string, number, true or false")
    return {"env": found}


def _after(entry: Entry) -> dict[str, Any]:
    remedy = "give a job's id, or a list of ids"
    entries = entry.one_or_more(remedy)
    return {"after": _without_repeats([_matching(item, _JOB_ID, remedy) for item in entries], entries)}


def _choice(entry: Entry, options: tuple[str, ...]) -> dict[str, Any]:
    if entry.value not in options:
        word = entry.value[:100] if isinstance(entry.value, str) else ""
        entry.refuse(choices(word, options))
    return {str(entry.path[-1]): entry.value}


def _queue(entry: Entry) -> dict[str, Any]:
    return {"queue": _matching(entry, _NAME, _NAME_REMEDY)}


def _deadline(entry: Entry) -> dict[str, Any]:
    remedy = "give a date and time with its zone, such as 2030-01-31T18:00:00+01:00, or seconds since 1970"
    value = entry.value
    if isinstance(value, str):
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            entry.refuse(remedy)
        if moment.tzinfo is None:
            entry.refuse(remedy)
        value = moment.timestamp()
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value < _LATEST:
        entry.refuse(remedy)
    return {"deadline": float(value)}


def _retries(entry: Entry) -> dict[str, Any]:
    return {"retries": entry.integer(0, _MAX_RETRIES, f"give a number from 0 to {_MAX_RETRIES}")}


READERS: Mapping[str, Callable[[Entry], dict[str, Any]]] = {
    "name": _name,
    "gpus": _gpus,
    "batch_size": _batch_size,
    "resources": _resources,
    "env": _env,
    "priority": lambda entry: _choice(entry, get_args(Priority)),
    "queue": _queue,
    "preemptible": lambda entry: {"preemptible": entry.boolean("give true or false")},
    "after": _after,
    "time_limit": lambda entry: {"time_limit_seconds": _duration(entry, low=_SHORTEST_SECONDS)},
    "retries": _retries,
    "grace": lambda entry: {"grace_seconds": _duration(entry, high=_MAX_GRACE_SECONDS)},
    "on_resize": lambda entry: _choice(entry, get_args(OnResize)),
    "group": lambda entry: {"group": _matching(entry, _NAME, _NAME_REMEDY)},
    "kind": lambda entry: {"kind": _matching(entry, _NAME, _NAME_REMEDY)},
    "deadline": _deadline,
}
