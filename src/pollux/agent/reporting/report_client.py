"""Sends reports to the scheduler, in a thread that training never waits for.

Without a scheduler (POLLUX_URL is not set) this does not run. `reporter` builds the reports.
"""

from __future__ import annotations

import http.client
import json
import logging
import math
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pollux.core.errors import InvalidInput, Unreachable
from pollux.wire.report import Report
from pollux.wire.socket_owners import check_server

__all__ = ["Address", "Reporter", "post_report"]

_log = logging.getLogger("pollux")
_TIMEOUT_SECONDS = 10.0
_LEAST_GAP_SECONDS = 2.0
_LEAST_SHARE = 0.25
_EVERY_SECONDS = 30.0
_MOST_EVERY_SECONDS = 600.0
_BACKOFF_SECONDS = (1.0, 60.0)
_PUT_OFF_SECONDS = 5.0
_NEWS = 0.05
_LARGEST_REPLY = 65_536

Post = Callable[[str], Mapping[str, Any]]


class _TooSoon(ConnectionError):
    """The service has had enough reports of this job for a while."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where one job's reports go: the service's URL, the job's id there, and the access token.

    `ca`, or the file `ca_file`: a certificate to trust besides the system's, as PEM text; empty and None for none.
    `server_user`: the user of this machine who may serve that URL besides the job's own and root.
    """

    url: str
    job_id: str
    token: str
    ca_file: Path | None = None
    ca: str = ""
    server_user: int | None = None

    def __post_init__(self) -> None:
        parts = urllib.parse.urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidInput(f"POLLUX_URL is '{self.url}': give http://host:port, or unset it to report nowhere")


def post_report(address: Address, body: str) -> Mapping[str, Any]:
    """Send one report and return the answer; `OSError` where the service does not answer or refuses."""
    connection = _connection_to(address)
    try:
        connection.connect()
        if not isinstance(connection, http.client.HTTPSConnection):
            check_server(connection.sock, lambda: () if address.server_user is None else (address.server_user,))
        headers = {"Authorization": f"Bearer {address.token}", "Content-Type": "application/json"}
        connection.request("POST", f"/v1/jobs/{urllib.parse.quote(address.job_id, safe='')}/reports", body, headers)
        response = connection.getresponse()
        text = response.read(_LARGEST_REPLY)
        if response.status == 429:
            raise _TooSoon
        if response.status >= 300:
            raise ConnectionError(f"the scheduler answered {response.status}: {text[:200].decode('utf-8', 'replace')}")
        reply = json.loads(text)
    except Unreachable as error:
        raise ConnectionError(str(error)) from None
    except (http.client.HTTPException, ValueError) as error:
        raise ConnectionError(f"the scheduler's answer is not HTTP with JSON ({error})") from error
    finally:
        connection.close()
    return reply if isinstance(reply, dict) else {}


def _connection_to(address: Address) -> http.client.HTTPConnection:
    parts = urllib.parse.urlsplit(address.url)
    host = parts.hostname or ""
    if parts.scheme == "http":
        return http.client.HTTPConnection(host, parts.port, timeout=_TIMEOUT_SECONDS)
    return http.client.HTTPSConnection(host, parts.port, timeout=_TIMEOUT_SECONDS, context=_trusting(address))


def _trusting(address: Address) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if address.ca or address.ca_file is not None:
        context.load_verify_locations(None if address.ca else address.ca_file, cadata=address.ca or None)
        # The certificate itself is trusted, even where the authority that signed it is not known.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


class Reporter:
    """Keeps the newest report and sends it as often as the service asks, and sooner where there is news.

    A first model or another batch is sent 2 seconds after the last report at the earliest, a changed goodput after a
    quarter of the time that the service asks for. Training calls `offer`, which returns at once. A report that could
    not be sent is replaced by a newer one; training does not wait for either.
    """

    def __init__(self, post: Post, clock: Callable[[], float] = time.monotonic) -> None:
        self._post = post
        self._clock = clock
        self._condition = threading.Condition()
        self._newest: Report | None = None
        self._sent: Report | None = None
        self._next_at = -math.inf
        self._sent_at = -math.inf
        self._every = _EVERY_SECONDS
        self._failures = 0
        self._closed = False
        self._thread: threading.Thread | None = None

    @classmethod
    def to(cls, address: Address) -> Reporter:
        """A reporter over HTTP."""
        return cls(lambda body: post_report(address, body))

    @property
    def wants_report(self) -> bool:
        """Whether a report could be sent now; asked before one is built."""
        with self._condition:
            is_time = self._failures > 0 or self._clock() >= self._sent_at + _LEAST_GAP_SECONDS
            return not self._closed and is_time

    def offer(self, report: Report) -> None:
        """Replace the report to send; it is sent when it is due, or at once where it has news."""
        with self._condition:
            if self._closed:
                return
            self._newest = report
            if self._failures == 0 and self._sent is not None:
                self._next_at = self._due_at(self._sent, report)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="pollux-reports", daemon=True)
                self._thread.start()
            self._condition.notify_all()

    def close(self, last: Report | None = None, timeout_seconds: float = 3.0) -> None:
        """End the thread. `last` is sent once, after a report that is being sent; both take at most this time."""
        with self._condition:
            if self._closed:
                return
            self._closed = True
            self._newest = None
            self._condition.notify_all()
        if last is not None:
            thread = threading.Thread(target=self._send_last, args=(last,), name="pollux-last-report", daemon=True)
            thread.start()
            thread.join(timeout_seconds)

    def _send_last(self, report: Report) -> None:
        if self._thread is not None:
            self._thread.join()
        self._send(report)

    def _due_at(self, before: Report, after: Report) -> float:
        """When the report `after` is to be sent, where `before` was the last one sent."""
        gap = self._every
        if _is_urgent(before, after):
            gap = _LEAST_GAP_SECONDS
        elif _has_moved(before, after):
            gap = max(_LEAST_GAP_SECONDS, _LEAST_SHARE * self._every)
        return self._sent_at + min(gap, self._every)

    def _work(self) -> None:
        while True:
            with self._condition:
                while not self._closed and (self._newest is None or self._clock() < self._next_at):
                    wait = None if self._newest is None else max(self._next_at - self._clock(), 0.0)
                    self._condition.wait(wait)
                if self._closed or self._newest is None:
                    return
                report, self._newest = self._newest, None
            self._send(report)

    def _send(self, report: Report) -> None:
        try:
            reply = self._post(json.dumps(asdict(report), allow_nan=False))
        except _TooSoon:
            self._put_off(report)
            return
        except (OSError, ValueError) as error:
            self._note_failure(report, str(error) or type(error).__name__)
            return
        with self._condition:
            now = self._clock()
            if self._failures:
                _log.info("the scheduler answers again after %d failed reports", self._failures)
            self._failures, self._sent = 0, report
            every = reply.get("report_every_seconds")
            if isinstance(every, int | float) and math.isfinite(every):
                self._every = min(max(float(every), _LEAST_GAP_SECONDS), _MOST_EVERY_SECONDS)
            self._sent_at = now
            self._next_at = self._due_at(report, self._newest or report)

    def _note_failure(self, report: Report, failure: str) -> None:
        """Send this report, or a newer one, after a while, which doubles with each failure."""
        with self._condition:
            self._failures += 1
            low, high = _BACKOFF_SECONDS
            self._next_at = self._clock() + min(low * 2.0 ** min(self._failures - 1, 10), high)
            self._newest = self._newest or report
            if self._failures == 1:
                _log.warning("a report did not reach the scheduler (%s); training goes on", failure)

    def _put_off(self, report: Report) -> None:
        """Send this report, or a newer one, at the usual time."""
        with self._condition:
            self._failures, self._sent_at = 0, self._clock()
            self._next_at = self._sent_at + min(_PUT_OFF_SECONDS, self._every)
            self._newest = self._newest or report


def _is_urgent(before: Report, after: Report) -> bool:
    """Whether the scheduler should know soon: there is a first model, or another batch."""
    return (before.model is None) != (after.model is None) or before.batch_size != after.batch_size


def _has_moved(before: Report, after: Report) -> bool:
    if before.goodput is None or after.goodput is None:
        return before.goodput is not after.goodput
    return abs(after.goodput - before.goodput) > _NEWS * before.goodput
