"""What the control groups of this process leave it of the machine, as in a container: memory and time on cores."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["GroupLimits", "read_limits"]


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """Bytes of memory, and how many cores' time; infinite where nothing is limited."""

    memory_bytes: float = math.inf
    cpus: float = math.inf


def read_limits(root: Path = Path("/")) -> GroupLimits:
    """The smallest limits of the group of this process and of those around it, in both versions of control groups.

    `root`: where `proc` and `sys` are. What cannot be read limits nothing.
    """
    memory, cpus = [math.inf], [math.inf]
    for folder in _folders(root):
        memory += [_number(folder, "memory.max"), _number(folder, "memory.limit_in_bytes")]
        cpus += [_ratio(_words(folder, "cpu.max"))]
        cpus += [_ratio([*_words(folder, "cpu.cfs_quota_us"), *_words(folder, "cpu.cfs_period_us")])]
    return GroupLimits(min(memory), min(cpus))


def _folders(root: Path) -> Iterator[Path]:
    """The folders of the groups that this process is in, from its own to the outermost one that is shown here."""
    proc = root / "proc" / "self"
    groups = [line.split(":", 2)[1:] for line in _lines(proc / "cgroup") if line.count(":") >= 2]
    for line in _lines(proc / "mountinfo"):
        words, _, rest = line.partition(" - ")
        place, kind = words.split(), rest.split()
        if len(place) < 5 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        for controllers, path in groups:
            # The one group of version 2 has no controllers in its name.
            named = set(controllers.split(",")) & set(kind[2].split(","))
            if (named & {"memory", "cpu"}) if kind[0] == "cgroup" else not controllers:
                yield from _upwards(root / place[4].lstrip("/"), path, place[3])


def _upwards(mounted: Path, path: str, shown: str) -> Iterator[Path]:
    """From a group to the one that is mounted, which is `shown` of all; a container may not see its own path."""
    inside = path.removeprefix(shown.rstrip("/")) if path.startswith(shown) else ""
    folder = mounted / inside.strip("/")
    folder = folder if folder.is_dir() and ".." not in folder.parts else mounted
    yield folder
    while folder != mounted:
        folder = folder.parent
        yield folder


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _words(folder: Path, name: str) -> list[str]:
    return " ".join(_lines(folder / name)).split()


def _number(folder: Path, name: str) -> float:
    words = _words(folder, name)
    # 0 is a mistake or a group that nothing runs in.
    return float(words[0]) if words and words[0].isdigit() and int(words[0]) else math.inf


def _ratio(words: list[str]) -> float:
    """Microseconds on cores in each period, as cores; words such as `max` and -1 are no limit."""
    if len(words) != 2 or not all(word.isdigit() and int(word) for word in words):
        return math.inf
    return int(words[0]) / int(words[1])
