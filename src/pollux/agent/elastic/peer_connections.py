"""Cuts the connections between replicas where a lost replica has left them open."""

from __future__ import annotations

import logging
import threading
import time

from pollux.agent.distributed.connections import cut, is_possible, own_ends
from pollux.agent.distributed.process_group import ReplicaGroup
from pollux.agent.elastic.membership import Membership

__all__ = ["PeerConnections"]

# The death of a replica closes its connections. The others notice that at once; after this time they never will.
_FREE_SECONDS = 1.0
_NO_GENERATION = (-1, 0)
_log = logging.getLogger("pollux")


class PeerConnections:
    """This replica's connections to the others of its generation.

    The training thread publishes and forgets them; another thread frees it from replicas that are lost.
    """

    def __init__(self, membership: Membership, replicas: ReplicaGroup) -> None:
        self._membership = membership
        self._replicas = replicas
        self._cutting = threading.Lock()
        self._published = _NO_GENERATION
        self._lost_since: tuple[int, float] | None = None
        self._freed = -1

    def publish(self, generation: int) -> None:
        """Write this replica's ends of connections to the store, so that others can cut them if it is lost."""
        if self._replicas.num_replicas > 1:
            self._membership.write_ends(generation, self._replicas.replica, own_ends())
        self._published = generation, self._replicas.num_replicas

    def forget(self) -> None:
        """Cut no connections of the old generation any more: new ones may have the same ports."""
        with self._cutting:
            self._published = _NO_GENERATION

    def free_from_lost(self) -> None:
        """Cut the connections of a generation a second after the loss of one of its replicas is known.

        A killed replica has freed the others by then; a node without network, or a stopped process, never does.
        """
        generation, num_replicas = self._published
        if num_replicas < 2 or self._freed == generation or not self._membership.lost(generation):
            return
        now = time.monotonic()
        if self._lost_since is None or self._lost_since[0] != generation:
            self._lost_since = generation, now
        elif now - self._lost_since[1] >= _FREE_SECONDS:
            self._freed = generation
            ends = self._membership.ends(generation, num_replicas)
            with self._cutting:
                # The training thread may have left this generation meanwhile.
                if self._published[0] == generation:
                    _cut(ends)
                    self._replicas.abort_collectives()


def _cut(ends: frozenset[str]) -> None:
    count = cut(ends)
    if count:
        _log.warning("replicas are lost and their connections are silent: cut %d connections", count)
    else:
        why = "socket.setdefaulttimeout is set" if not is_possible() else "none of their ends is known here"
        _log.warning("replicas are lost and their connections are silent, but none was cut: %s", why)
