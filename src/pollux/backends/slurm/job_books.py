"""Slurm without pilots: the places that each job wants and holds."""

from __future__ import annotations

import threading
from collections.abc import Collection, Container, Mapping

from pollux.backends.nodes.provider import LentNode, PooledNodeProvider

__all__ = ["JobBooks"]


class JobBooks(PooledNodeProvider):
    """Gives places only on nodes whose host is `up`; Slurm has not lent the other offered nodes yet.

    `up` is set under the `lock`, so that no job gets a place on a host that is about to be ended.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up: Mapping[str, LentNode] = {}

    @property
    def lock(self) -> threading.RLock:
        """Held while places are given."""
        return self._books

    def tell_change(self) -> None:
        """Tell the backend that something has changed."""
        self._changed()

    def wanted(self) -> dict[str, set[str]]:
        """The nodes on which each job wants places."""
        with self.lock:
            return {job: set(nodes) for job, nodes in self._wanted.items()}

    def jobs_wanting(self, names: Collection[str]) -> list[str]:
        """The jobs that want places on any of these nodes."""
        return [job for job, nodes in self.wanted().items() if not nodes.isdisjoint(names)]

    def needed(self) -> set[str]:
        """The nodes on which jobs hold or want places."""
        with self.lock:
            return self.nodes_in_use().union(*self._wanted.values())

    def working(self) -> set[str]:
        """The nodes that jobs use; a job that waits for some of its nodes does not use the others yet."""
        with self.lock:
            return set().union(*map(self._works_on, self._held))

    def _works_on(self, job_id: str) -> set[str]:
        held, wanted = self._held.get(job_id, {}), self._wanted.get(job_id, {})
        waits = any(len(held.get(node, ())) < number for node, number in wanted.items())
        return {node for node, places in held.items() if places and not (waits and node in wanted)}

    def _giving(self) -> Container[str]:
        return self.up.keys() & self._sizes.keys()
