"""Who is connected, and who has to go where there are too many. What is said on a connection is in `connections`."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["ConnectionLimits", "Peer", "Peers", "raise_open_files"]

_MOST_OPEN_FILES = 65536
_MOST_CONNECTIONS = 8192
_MOST_STRANGERS = 512


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """How many connections there may be, and how long each may take for what. A stranger has not shown a token yet.

    `header_seconds` and `body_seconds` are for a whole request as it comes, `stuck_seconds` for a peer that takes
    nothing of what it asked for, the others for a connection between two requests.
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
    """Raise the soft limit of open files as far as it may go; what it is then."""
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

    `drop` ends the connection at once. `is_idle`: nothing has been asked that is not answered.
    """

    __slots__ = ("_peers", "address", "drop", "is_idle", "is_known")

    def __init__(self, peers: Peers, address: str) -> None:
        self._peers = peers
        self.address = address
        self.is_known = False
        self.is_idle = True
        self.drop: Callable[[], None] = lambda: None

    def know(self) -> None:
        """It has shown a token that is right."""
        if not self.is_known:
            self._peers.know(self)


class Peers:
    """All that are connected. Where there are too many the oldest stranger goes, of the address that has most of them.

    Who sends a request at once shows its token long before that is its turn, however many others only connect. Where
    there are no strangers an idle connection goes, and else the oldest: a stream of events, whose reader comes again.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._strangers: dict[str, dict[Peer, None]] = {}
        self._known: dict[Peer, None] = {}
        self.num_strangers = 0
        self.num_dropped = 0

    def __len__(self) -> int:
        return self.num_strangers + len(self._known)

    def come(self, address: str) -> Peer:
        """Somebody new, for whom another goes where there is no room."""
        if self.num_strangers >= self._limits.most_strangers:
            self.drop_a_stranger()
        elif len(self) >= self._limits.most and not self.drop_a_stranger():
            self._drop(next((peer for peer in self._known if peer.is_idle), next(iter(self._known))))
        peer = Peer(self, address)
        self._strangers.setdefault(address, {})[peer] = None
        self.num_strangers += 1
        return peer

    def know(self, peer: Peer) -> None:
        """A stranger has shown a token."""
        if self._forget_stranger(peer):
            peer.is_known = True
            self._known[peer] = None

    def leave(self, peer: Peer) -> None:
        """A connection has ended."""
        self._forget_stranger(peer)
        self._known.pop(peer, None)

    def drop_a_stranger(self) -> bool:
        """End the oldest connection without a token, of the address that has most of them; whether there was one."""
        if not self._strangers:
            return False
        most = max(self._strangers.values(), key=len)
        self._drop(next(iter(most)))
        return True

    def _drop(self, peer: Peer) -> None:
        self.leave(peer)
        self.num_dropped += 1
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
