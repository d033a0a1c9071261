"""Nodes on which jobs fail again and again, and nodes that are set aside; pure.

A failure counts against a node only if the script is not to blame: the script has failed on no other node, or has run
well on one. A node is suspect after failures of several such scripts, or several failures of one that ran well
elsewhere. The service then logs a fact that sets it aside; policies place nothing new there until it is taken back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from pollux.controller.state.records import JobRecord

__all__ = ["FAILED_SCRIPTS", "FAILURES_OF_ONE", "NodeTrust", "script_of"]

FAILED_SCRIPTS = 3
"""A node is suspect if this many different scripts fail on it and on no other."""

FAILURES_OF_ONE = 3
"""A node is suspect if a script that ran well elsewhere fails on it this often."""

_MOST_SCRIPTS = 500


def script_of(record: JobRecord) -> str:
    """What a job runs, without its arguments: a sweep over arguments of one bad script is one script that fails."""
    request = record.spec.request
    if request is None:
        return record.kind or record.spec.id
    words = []
    for word in request.run:
        words.append(word)
        if not word.startswith("-") and len(words) > 1:
            break
    return " ".join([str(request.workdir), *words])


class NodeTrust:
    """Failures by node and script since a script last ran well there, where scripts ran well, and nodes set aside.

    Only generations on a single node count: with several, the node at fault is unknown.
    """

    def __init__(self) -> None:
        self.set_aside: dict[str, str] = {}
        self._failures: dict[str, dict[str, int]] = {}
        self._good: dict[str, dict[str, None]] = {}

    def note_failure(self, node_id: str, script: str) -> None:
        """Replicas of that script failed there."""
        failures = self._failures.setdefault(node_id, {})
        failures[script] = failures.get(script, 0) + 1
        _shorten(failures)

    def note_good(self, node_id: str, script: str) -> None:
        """Replicas of that script ran well there, so earlier failures do not count against the node."""
        self._failures.pop(node_id, None)
        self._good.setdefault(script, {})[node_id] = None
        _shorten(self._good)

    def suspects(self, usable: Collection[str]) -> Iterator[tuple[str, str]]:
        """Nodes to set aside, and why; never the last usable one."""
        left = [node_id for node_id in usable if node_id not in self.set_aside]
        for node_id in list(left):
            why = self._case_against(node_id)
            if why and len(left) > 1:
                left.remove(node_id)
                yield node_id, why

    def _case_against(self, node_id: str) -> str:
        failures = self._failures.get(node_id, {})
        blameless = [script for script in failures if self._is_blameless(script, node_id)]
        again = [script for script in blameless if self._ran_well_elsewhere(script, node_id)]
        most = max((failures[script] for script in again), default=0)
        if most >= FAILURES_OF_ONE:
            return f"a job that runs well elsewhere failed there {most} times"
        if len(blameless) >= FAILED_SCRIPTS:
            return f"{len(blameless)} different scripts failed there one after the other, and nowhere else"
        return ""

    def _is_blameless(self, script: str, node_id: str) -> bool:
        elsewhere = any(script in failed for other, failed in self._failures.items() if other != node_id)
        return not elsewhere or self._ran_well_elsewhere(script, node_id)

    def _ran_well_elsewhere(self, script: str, node_id: str) -> bool:
        return any(other != node_id for other in self._good.get(script, {}))

    def put_aside(self, node_id: str, why: str) -> None:
        """Place nothing new there."""
        self.set_aside[node_id] = why

    def take_back(self, node_id: str) -> None:
        """Use it again; earlier failures there no longer count."""
        self.set_aside.pop(node_id, None)
        self._failures.pop(node_id, None)

    def state(self) -> dict[str, Any]:
        """As plain JSON values."""
        good = {script: list(nodes) for script, nodes in self._good.items()}
        failures = {node_id: dict(counts) for node_id, counts in self._failures.items()}
        return {"set_aside": dict(self.set_aside), "failures": failures, "good": good}

    @classmethod
    def restored(cls, saved: Mapping[str, Any]) -> NodeTrust:
        """What `state` gave; empty if nothing was saved."""
        trust = cls()
        trust.set_aside = {str(node_id): str(why) for node_id, why in saved.get("set_aside", {}).items()}
        for node_id, counts in saved.get("failures", {}).items():
            trust._failures[node_id] = {script: int(count) for script, count in counts.items()}
        trust._good = {script: dict.fromkeys(nodes) for script, nodes in saved.get("good", {}).items()}
        return trust


def _shorten(known: dict[str, Any]) -> None:
    """Forget the oldest entries if there are too many."""
    while len(known) > _MOST_SCRIPTS:
        del known[next(iter(known))]
