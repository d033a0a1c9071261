"""Sessions of browsers: a random id in a cookie; only its keyed hash is stored."""

from __future__ import annotations

import hmac
import itertools
import json
import logging
import secrets
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pollux.core.errors import StoreFailed, Unauthorised
from pollux.service.auth.tokens import Role, Tokens
from pollux.store.protocol import Store

__all__ = ["COOKIE", "CSRF_HEADER", "SESSION_SECONDS", "Session", "Sessions", "WrongTokens", "cookie_of"]

COOKIE = "pollux_session"
"""The prefix of the cookie's name; a mark of the service follows, since browsers share cookies among all ports."""

CSRF_HEADER = "x-pollux-csrf"
"""The header that a signed-in page sends with every request that changes something."""

SESSION_SECONDS = 7 * 86400.0
"""How long a browser stays signed in."""

_SETTING = "sessions"
_MOST_PER_ROLE = 128
_LONGEST_ID = 256

_log = logging.getLogger("pollux.service")


@dataclass(frozen=True, slots=True)
class Session:
    """A signed-in browser: its role, and a secret that only its own pages know."""

    role: Role
    csrf: str


@dataclass(frozen=True, slots=True)
class _Kept:
    role: Role
    token: str
    expires_at: float


class Sessions:
    """Opens, finds and closes sessions; they survive a restart, and end when the token they were opened with changes.

    May be used from any thread. The newest 128 of each role are kept: viewers cannot sign operators out.
    """

    def __init__(self, store: Store, tokens: Tokens, now: Callable[[], float]) -> None:
        self._store = store
        self._tokens = tokens
        self._now = now
        self._lock = threading.Lock()
        self._kept: dict[str, _Kept] = {}
        self._watchers: dict[str, dict[int, Callable[[], None]]] = {}
        self._numbers = itertools.count()
        self.cookie = f"{COOKIE}_{tokens.sign('cookie', '')[:8]}"
        try:
            for digest, (role, token, expires_at) in json.loads(store.setting(_SETTING) or "{}").items():
                if role not in ("operator", "viewer") or not isinstance(token, str):
                    raise ValueError("no session")
                self._kept[digest] = _Kept(role, token, float(expires_at))
        except (StoreFailed, ValueError, TypeError, AttributeError, OverflowError, RecursionError):
            self._kept = {}
            _log.warning("the stored sessions cannot be read; browsers have to sign in again")

    def open(self, token: str) -> tuple[str, Session]:
        """A new session for a token, and the id for its cookie; Unauthorised for an unknown token."""
        role = self._tokens.role_of(token)
        if role is None:
            raise Unauthorised(
                "this service does not know the token; POLLUX_HOME has the right ones in 'token' and 'viewer-token'"
            )
        session_id = secrets.token_urlsafe(32)
        kept = _Kept(role, self._tokens.mark_of(role), self._now() + SESSION_SECONDS)
        with self._lock:
            live = {digest: old for digest, old in self._kept.items() if self._holds(old)}
            same = sorted(
                (digest for digest in live if live[digest].role == role), key=lambda each: live[each].expires_at
            )
            for digest in same[: -(_MOST_PER_ROLE - 1)]:
                del live[digest]
            ended = self._kept.keys() - live.keys()
            self._kept = {**live, self._digest(session_id): kept}
            self._save()
        self._tell(ended)
        return session_id, Session(role, self._csrf(session_id))

    def id_in(self, header: str | None) -> str | None:
        """The session id of this service in a `Cookie` header; None if there is none."""
        return cookie_of(header, self.cookie)

    def find(self, session_id: str) -> Session | None:
        """The session of an id; None if there is none, or it has ended."""
        kept = self._kept.get(self._digest(session_id))
        if kept is None or not self._holds(kept):
            return None
        return Session(kept.role, self._csrf(session_id))

    def close(self, session_id: str) -> None:
        """End a session, if it exists."""
        digest = self._digest(session_id)
        with self._lock:
            if self._kept.pop(digest, None) is not None:
                self._save()
        self._tell((digest,))

    def watch(self, session_id: str, tell: Callable[[], None]) -> Callable[[], None]:
        """Call `tell`, in any thread, once somebody ends a session; the returned function ends the watch.

        A session that grows too old ends without a call: ask `find` from time to time.
        """
        digest, number = self._digest(session_id), next(self._numbers)
        with self._lock:
            self._watchers.setdefault(digest, {})[number] = tell

        def unwatch() -> None:
            with self._lock:
                watchers = self._watchers.get(digest, {})
                watchers.pop(number, None)
                if not watchers:
                    self._watchers.pop(digest, None)

        return unwatch

    def _tell(self, digests: Iterable[str]) -> None:
        with self._lock:
            told = [tell for digest in digests for tell in self._watchers.pop(digest, {}).values()]
        for tell in told:
            tell()

    def _holds(self, kept: _Kept) -> bool:
        return kept.expires_at > self._now() and hmac.compare_digest(kept.token, self._tokens.mark_of(kept.role))

    def _digest(self, session_id: str) -> str:
        return self._tokens.sign("session", session_id)

    def _csrf(self, session_id: str) -> str:
        return self._tokens.sign("csrf", session_id)

    def _save(self) -> None:
        kept = {digest: (entry.role, entry.token, entry.expires_at) for digest, entry in self._kept.items()}
        try:
            self._store.set_setting(_SETTING, json.dumps(kept))
        except StoreFailed as error:
            # Signing in must work even if the disk is full.
            _log.warning("sessions cannot be stored, and will end at a restart: %s", error)


def cookie_of(header: str | None, name: str) -> str | None:
    """The value of a cookie in a `Cookie` header; None if it is missing.

    Other servers on the same host may have set any other cookies; these are ignored.
    """
    for part in (header or "").split(";"):
        found, _, value = part.partition("=")
        if found.strip() == name and 0 < len(value.strip()) <= _LONGEST_ID:
            return value.strip().strip('"')
    return None


class WrongTokens:
    """How long a caller with a wrong token has to wait: not at all at first, a second once there were many.

    A token bucket of five, refilled by one in three seconds. None: refused, since too many wait already.
    """

    def __init__(self, now: Callable[[], float], burst: int = 5, refill_seconds: float = 3.0, most: int = 32) -> None:
        self._now = now
        self._burst, self._refill, self._most = burst, refill_seconds, most
        self._left, self._at = float(burst), now()
        self._waiting = 0

    def start_attempt(self) -> float | None:
        """Count a wrong token; seconds to wait, then `end_attempt` must be called. None: refuse the caller at once."""
        now = self._now()
        self._left = min(self._left + max(now - self._at, 0.0) / self._refill, float(self._burst))
        self._at = now
        if self._left >= 1.0:
            self._left -= 1.0
            self._waiting += 1
            return 0.0
        if self._waiting >= self._most:
            return None
        self._waiting += 1
        return 1.0

    def end_attempt(self) -> None:
        """Note that a waiting caller was answered."""
        self._waiting -= 1
