"""The connected peers, and which of them are dropped if there are too many. `connections` has the protocol."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable
from dataclasses import dataclass

from pollux.service.views.refusals import ApiRefusals

__all__ = ["ConnectionLimits", "Peer", "Peers", "raise_open_files"]

_MOST_OPEN_FILES = 65536
_MOST_CONNECTIONS = 8192
_MOST_STRANGERS = 512


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The limits of the number of connections and of their times. A stranger has not shown a token yet.

    `header_seconds` and `body_seconds` are for the arrival of a whole request, `stuck_seconds` for a peer that takes
    nothing of its answer, the others for a connection between two requests.
    """

    most: int = 4096
    most_strangers: int = _MOST_STRANGERS
    header_seconds: float = 10.0
    body_seconds: float = 60.0
    stuck_seconds: float = 60.0
    keep_alive_seconds: float = 75.0
    stranger_keep_alive_seconds: float = 5.0

    @classmethod
    def for_open_files(cls, num_files: int) -> ConnectionLimits:
        """Half of the files that a process may open, so that the store, logs and jobs never lack any."""
        most = max(16, min(_MOST_CONNECTIONS, num_files // 2))
        return cls(most, max(8, min(_MOST_STRANGERS, most // 4)))


def raise_open_files() -> int:
    """Raise the soft limit of open files as far as it may go; returns the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # Some containers forbid it.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MOST_OPEN_FILES if soft == resource.RLIM_INFINITY else soft


class Peer:
    """The other end of one connection: a stranger until it has shown a token.

    `drop` ends the connection at once. `is_idle`: all its requests have been answered.
    """

    __slots__ = ("_peers", "address", "drop", "is_idle", "is_known")

    def __init__(self, peers: Peers, address: str) -> None:
        self._peers = peers
        self.address = address
        self.is_known = False
        self.is_idle = True
        self.drop: Callable[[], None] = lambda: None

    def know(self) -> None:
        """Note that the peer has shown a valid token."""
        if not self.is_known:
            self._peers.know(self)


class Peers:
    """All connected peers. If there are too many, the oldest stranger goes, of the address that has most of them.

    A peer that sends a request at once shows its token long before its turn comes, however many others only connect.
    If there are no strangers, an idle connection goes, else the oldest: an event stream, whose reader comes again.
    """

    def __init__(self, limits: ConnectionLimits, refusals: ApiRefusals | None = None) -> None:
        self._limits = limits
        self.refusals = refusals or ApiRefusals()
        self._strangers: dict[str, dict[Peer, None]] = {}
        self._known: dict[Peer, None] = {}
        self.num_strangers = 0
        self.num_dropped = 0

    def __len__(self) -> int:
        return self.num_strangers + len(self._known)

    def come(self, address: str) -> Peer:
        """Add a new peer; if there is no room, another one goes."""
        if self.num_strangers >= self._limits.most_strangers:
            self.drop_a_stranger()
        elif len(self) >= self._limits.most and not self.drop_a_stranger():
            self._drop(next((peer for peer in self._known if peer.is_idle), next(iter(self._known))))
        peer = Peer(self, address)
        self._strangers.setdefault(address, {})[peer] = None
        self.num_strangers += 1
        return peer

    def know(self, peer: Peer) -> None:
        """Note that a stranger has shown a token."""
        if self._forget_stranger(peer):
            peer.is_known = True
            self._known[peer] = None

    def leave(self, peer: Peer) -> None:
        """Remove a peer whose connection has ended."""
        self._forget_stranger(peer)
        self._known.pop(peer, None)

    def drop_a_stranger(self) -> bool:
        """End the oldest connection without a token, of the address with most; returns whether there was one."""
        if not self._strangers:
            return False
        most = max(self._strangers.values(), key=len)
        self._drop(next(iter(most)))
        return True

    def _drop(self, peer: Peer) -> None:
        self.leave(peer)
        self.num_dropped += 1
        what = "is the longest without a request" if peer.is_known else "has shown no token"
        self.refusals.tell(peer.address, "dropped", f"there are too many connections, and it {what}")
        peer.drop()

    def _forget_stranger(self, peer: Peer) -> bool:
        strangers = self._strangers.get(peer.address)
        if strangers is None or peer not in strangers:
            return False
        del strangers[peer]
        if not strangers:
            del self._strangers[peer.address]
        self.num_strangers -= 1
        return True
