"""What the engines' parts of Pollux need to run a node daemon as their child."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

__all__ = ["daemon_words", "has_replicas"]


def daemon_words(
    node: str, places: int, listen: str, announce: Path, gpus: Sequence[int] = (), warm: bool = True
) -> list[str]:
    """The words after the interpreter that start a daemon, which ends when its input is closed."""
    words = ["-m", "pollux.backends.node_daemon.daemon", "--node", node, "--places", str(places), "--listen", listen]
    words += ["--announce", str(announce), "--with-parent"]
    words += ["--gpus", ",".join(map(str, gpus))] if gpus else []
    return words if warm else [*words, "--cold"]


def has_replicas(pid: int) -> bool:
    """Whether a daemon runs replicas, or their runners: it has no other children."""
    try:
        return bool(Path(f"/proc/{pid}/task/{pid}/children").read_text().strip())
    except OSError:
        return True
