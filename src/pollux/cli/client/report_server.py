"""The endpoint for reports of the agent under `pollux run`: all of the API that an engine without a service needs.

Any user of the machine can connect. A connection carries one request, whose token is looked at before its body; it has
a few seconds for each of the two, however steadily it sends. Where there are too many connections, the oldest of those
without a token is closed. Strangers are answered or dropped, and write nothing to the terminal, which is the job's.
"""

from __future__ import annotations

import io
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from pollux.core.errors import Forbidden, InvalidInput, PolluxError, TooLarge, Unreachable

if TYPE_CHECKING:
    from pollux.service import Engine

__all__ = ["ReportServer", "open_report_server"]

_log = logging.getLogger("pollux.run")
_REPORTS = re.compile(r"/v1/jobs/([^/?]+)/reports")
_SECONDS = 10.0
_MOST_CONNECTIONS = 64
_MAX_HEADER_BYTES = 16 * 1024


class ReportServer:
    """Receives reports on the loopback and passes them to the engine."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.engine: Engine | None = None

    def admit(self, path: str, authorization: str | None) -> str:
        """The job that a request with this token may report for; raises the errors that the service would raise."""
        found = _REPORTS.fullmatch(path)
        if found is None:
            raise InvalidInput(f"there is no {path[:200]} here: 'pollux run' takes reports only")
        if self.engine is None:
            raise Unreachable("not started yet")
        caller = self.engine.tokens.caller(authorization)
        if caller.role == "viewer" or caller.job_id not in (None, found.group(1)):
            raise Forbidden("a job may report for itself only")
        return found.group(1)

    def answer(self, job_id: str, body: bytes) -> dict[str, Any]:
        """The reply to a report; raises the errors that the service would raise."""
        from pollux.wire.codec import decode, decode_json, encode
        from pollux.wire.report import Report

        assert self.engine is not None
        report = decode(Report, decode_json(body, "report"), "report")
        answer: dict[str, Any] = encode(self.engine.report(job_id, report).result())
        return answer


class _Connections(ThreadingHTTPServer):
    """A server with a bound on its connections, and on the time that each may take."""

    daemon_threads = True
    request_queue_size = 128
    reports: ReportServer

    def __init__(self) -> None:
        # Whether it has shown a token, and its deadline: the smallest goes first.
        self._open: dict[socket.socket, tuple[bool, float]] = {}
        self._lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), _Handler)
        self.reports = ReportServer(f"http://127.0.0.1:{self.server_address[1]}")

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a thread of its own; where there are too many, another one is closed for it."""
        with self._lock:
            if len(self._open) >= _MOST_CONNECTIONS:
                self._drop(min(self._open, key=self._open.__getitem__))
            self._open[request] = False, time.monotonic() + _SECONDS
        super().process_request(request, client_address)

    def keep(self, request: socket.socket) -> None:
        """Give a connection that has shown a token its time for the rest."""
        with self._lock:
            if request in self._open:
                self._open[request] = True, time.monotonic() + _SECONDS

    def service_actions(self) -> None:
        """Close the connections whose time is up; called twice a second."""
        now = time.monotonic()
        with self._lock:
            for request in [each for each, (_, until) in self._open.items() if until < now]:
                self._drop(request)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection that was answered."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def _drop(self, request: socket.socket) -> None:
        """End it; its thread closes it."""
        del self._open[request]
        with suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of connections that end early; a defect of ours is one line."""
        import sys

        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            _log.error("a report could not be answered (%s: %s)", type(error).__name__, error)


class _Opening(io.BufferedReader):
    """What a connection sends, with a bound on the bytes before the body."""

    left = _MAX_HEADER_BYTES

    def readline(self, size: int | None = -1, /) -> bytes:
        """The next line; ConnectionError after too many bytes."""
        line = super().readline(self.left + 1)
        self.left -= len(line)
        if self.left < 0:
            raise ConnectionError("the headers are too long")
        return line


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Connections

    def setup(self) -> None:
        super().setup()
        self.rfile = _Opening(self.connection.makefile("rb", buffering=0))

    def handle(self) -> None:
        self.close_connection = True
        self.handle_one_request()

    def do_POST(self) -> None:
        reports = self.server.reports
        try:
            job_id = reports.admit(self.path, self.headers.get("Authorization"))
            self.server.keep(self.connection)
            status, answer = 200, reports.answer(job_id, self._body())
        except PolluxError as error:
            status = error.http_status
            said = {"code": type(error).__name__, "message": str(error), "retryable": error.retryable}
            answer = {"error": said}
        self._send(status, answer)

    def _body(self) -> bytes:
        from pollux.wire.codec import MAX_BODY_BYTES

        length = self.headers.get("Content-Length") or ""
        is_number = length.isascii() and length.isdigit() and len(length) < 10
        if not is_number or int(length) > MAX_BODY_BYTES:
            raise TooLarge(f"the report's length is {length[:20]!r}: give at most {MAX_BODY_BYTES} bytes")
        return self.rfile.read(int(length))

    def _send(self, status: int, answer: dict[str, Any]) -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *values: Any) -> None:
        """Log nothing: the terminal is for the job's output."""


@contextmanager
def open_report_server() -> Iterator[ReportServer]:
    """A server of reports on a free port, open while the block runs."""
    server = _Connections()
    thread = threading.Thread(target=server.serve_forever, daemon=True, name="pollux-reports")
    thread.start()
    try:
        yield server.reports
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
