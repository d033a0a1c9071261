"""The pool's folder, which service and nodes share: secret, pulse, notes of nodes, logs of pilots."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pollux.backends.slurm.parse import NodeRow, PilotRow
from pollux.backends.slurm.pool_plan import NodeNote
from pollux.core.errors import BackendFailed, InvalidInput, PolluxError
from pollux.storage.foreign_file import open_inside
from pollux.storage.state_file import folder_fault, read_json, read_state, write_state

__all__ = ["PoolFolder"]

_KEPT_LOGS = 100
_ODD_SIGNS = frozenset("%\\\n\"'$`")


class PoolFolder:
    """The files below `path`. Nodes write `pilots/<pilot>.<node>.<what>`; the node `-` is the whole pilot."""

    def __init__(self, path: Path) -> None:
        if any(sign in str(path) for sign in _ODD_SIGNS) or len(str(path)) > 900:
            raise InvalidInput(f"the folder '{path}' cannot be named in a batch script: choose a home of plain letters")
        self.path = path
        self.pilots = path / "pilots"
        self._notes: dict[tuple[str, str], NodeNote] = {}
        self._whole: set[tuple[str, str]] = set()
        self._beats = 0

    def prepare(self, secret: bytes) -> None:
        """Make the folder, for its owner only, with the secret for hosts; refuses one that others can use."""
        try:
            for folder in (self.path, self.pilots, self.path / "names"):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                if fault := folder_fault(folder):
                    raise InvalidInput(
                        f"the pool's folder {folder} is to hold the fleet's secret, and {fault}; remove it, or name "
                        "another with pool=FOLDER"
                    )
            self._put("secret", secret.hex() + "\n")
        except OSError as error:
            raise BackendFailed(f"cannot write {self.path}: {error.strerror}; check its rights and space") from None

    def write_pulse(self, word: str = "") -> None:
        """Show the nodes that the service runs; `word` says that it ends."""
        self._beats += 1
        self._put("pulse", f"{word or 'here'} {os.getpid()} {self._beats}\n")

    def _put(self, name: str, text: str) -> None:
        write_state(self.path / name, text.encode(), durable=False)

    # Notes of nodes

    def notes(self) -> tuple[Mapping[tuple[str, str], NodeNote], list[str]]:
        """The notes by pilot and node, and complaints about files that cannot be read. Each file is read once."""
        odd: list[str] = []
        for pilot, node, what, path in self._files():
            key = (pilot, node)
            known = self._notes.get(key, NodeNote())
            if what == "leaving" and not known.is_leaving:
                self._notes[key] = replace(known, is_leaving=True)
            elif what == "problem" and not known.problem:
                found = read_state(path)
                if found is not None:
                    self._notes[key] = replace(known, problem=found.decode(errors="replace").strip()[:500] or "?")
            elif what == "json" and key not in self._whole:
                self._announced(key, known, path, odd)
        return self._notes, odd

    def _files(self) -> list[tuple[str, str, str, Path]]:
        try:
            names = os.listdir(self.pilots)
        except OSError as error:
            raise BackendFailed(f"cannot look into {self.pilots}: {error.strerror}; check its rights") from None
        found = []
        for name in names:
            pilot, dot, rest = name.partition(".")
            node, last, what = rest.rpartition(".")
            if pilot and dot and last:
                found.append((pilot, node, what, self.pilots / name))
        return found

    def _announced(self, key: tuple[str, str], known: NodeNote, path: Path, odd: list[str]) -> None:
        try:
            more = path.with_suffix(".facts")
            host, facts = read_json(path), read_json(more)
            if (host is None or facts is None) and not (path.exists() and more.exists()):
                return
            note = _note(host, facts)
        except (AttributeError, ValueError, TypeError, KeyError, OverflowError) as error:
            odd.append(f"{path} cannot be used: {error!r}")
            return
        self._whole.add(key)
        self._notes[key] = replace(note, problem=known.problem, is_leaving=known.is_leaving)

    # Pilots

    def last_log_line(self, pilot: str) -> str:
        """The last line of a pilot's log; empty for none."""
        try:
            with open_inside(self.pilots, f"{pilot}.log") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
                lines = [line.strip() for line in file.read(4096).decode("utf-8", "replace").splitlines()]
        except (OSError, PolluxError):
            return ""
        return next((line[:300] for line in reversed(lines) if line), "")

    def save_running(self, rows: Iterable[PilotRow], states: Mapping[str, NodeRow]) -> None:
        """Save which pilots run and what their nodes have, for a service that starts while Slurm does not answer."""
        running = [row for row in rows if row.has_nodes]
        there = [states[name] for row in running for name in row.nodes if name in states]
        kept = {
            "pilots": [[row.id, list(row.nodes), row.comment] for row in running],
            "nodes": {row.name: [row.gres, row.address, row.cpus] for row in there},
        }
        self._put("running.json", json.dumps(kept))

    def load_running(self) -> tuple[list[PilotRow], dict[str, NodeRow]]:
        """The pilots and nodes that were saved last; none where the file cannot be read."""
        try:
            kept = read_json(self.path / "running.json")
            pilots = [
                PilotRow(str(i), "RUNNING", None, None, tuple(map(str, n)), str(c), "") for i, n, c in kept["pilots"]
            ]
            nodes = {
                str(name): NodeRow(str(name), "unknown", "held", str(gres), "", str(address), float(cpus))
                for name, (gres, address, cpus) in kept["nodes"].items()
            }
        except (ValueError, TypeError, LookupError, AttributeError):
            return [], {}
        return pilots, nodes

    def pilots_on_disk(self) -> dict[str, list[str]]:
        """The pilots that have files here, each with the nodes whose names it has taken."""
        found: dict[str, list[str]] = {pilot: [] for pilot, _, _, _ in self._files()}
        for name in (self.path / "names").glob("*"):
            if (pilot := _owner(name)) is not None:
                found.setdefault(pilot, []).append(name.name)
        return found

    def remove_ended(self, ended: Mapping[str, Iterable[str]]) -> None:
        """Remove the notes of these pilots, which have ended, and of their nodes; their logs stay for a while."""
        for pilot, nodes in ended.items():
            self._free_names(pilot, nodes)
        self._forget(lambda pilot, node: pilot in ended)
        logs = sorted(self.pilots.glob("*.log"), key=_age)
        for log in logs[:-_KEPT_LOGS]:
            log.unlink(missing_ok=True)

    def forget_nodes(self, pilot: str, nodes: Collection[str]) -> None:
        """Remove the notes of nodes that a pilot has lost."""
        self._free_names(pilot, nodes)
        self._forget(lambda owner, node: owner == pilot and node in nodes)

    def _free_names(self, pilot: str, nodes: Iterable[str]) -> None:
        for node in nodes:
            name = self.path / "names" / node
            if _owner(name) == pilot:
                name.unlink(missing_ok=True)

    def _forget(self, goes: Callable[[str, str], bool]) -> None:
        for pilot, node, _, path in self._files():
            if goes(pilot, node):
                path.unlink(missing_ok=True)
        for key in [key for key in self._notes if goes(*key)]:
            del self._notes[key]
            self._whole.discard(key)


def _owner(name: Path) -> str | None:
    """The pilot that has taken a node's name; None for none."""
    found = read_state(name)
    return None if found is None else found.decode(errors="replace").strip()


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _note(host: Mapping[str, Any], facts: Mapping[str, Any]) -> NodeNote:
    """The note of a host and its node; ValueError for impossible values."""
    note = NodeNote(
        str(host["node"]),
        (str(facts.get("address") or host["address"]), int(host["port"])),
        int(host["places"]),
        tuple(int(gpu) for gpu in host["gpus"] or ()),
        str(facts["gpu_type"]),
        float(facts["cpus"]),
        float(facts["memory_bytes"]),
    )
    if not note.id or not 0 < note.address[1] < 65536 or note.places < 1 or len(note.gpus) not in (0, note.places):
        raise ValueError(f"node '{note.id}', port {note.address[1]}, {note.places} places, {len(note.gpus)} GPUs")
    if not (note.cpus >= 0 and note.memory_bytes >= 0):
        raise ValueError(f"node '{note.id}', {note.cpus} CPUs, {note.memory_bytes} bytes")
    return note
