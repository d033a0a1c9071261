"""The endpoint for reports of the agent under `pollux run`: all of the API that an engine without a service needs."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from pollux.core.errors import Forbidden, InvalidInput, PolluxError, TooLarge, Unreachable

if TYPE_CHECKING:
    from pollux.service import Engine

__all__ = ["ReportServer", "open_report_server"]

_REPORTS = re.compile(r"/v1/jobs/([^/?]+)/reports")
_TIMEOUT_SECONDS = 30.0


class ReportServer:
    """Receives reports on the loopback and passes them to the engine."""

    def __init__(self, server: ThreadingHTTPServer) -> None:
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        self.engine: Engine | None = None

    def answer(self, path: str, authorization: str | None, body: bytes) -> dict[str, Any]:
        """The reply to a report; raises the errors that the service would raise."""
        from pollux.wire.codec import decode, decode_json, encode
        from pollux.wire.report import Report

        found = _REPORTS.fullmatch(path)
        if found is None:
            raise InvalidInput(f"there is no {path} here: 'pollux run' takes reports only")
        if self.engine is None:
            raise Unreachable("not started yet")
        if self.engine.tokens.caller(authorization).job_id not in (None, found.group(1)):
            raise Forbidden("a job may report for itself only")
        report = decode(Report, decode_json(body, "report"), "report")
        reply = self.engine.report(found.group(1), report).result()
        answer: dict[str, Any] = encode(reply)
        return answer


@contextmanager
def open_report_server() -> Iterator[ReportServer]:
    """A server of reports on a free port, open while the block runs."""
    reports: ReportServer

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = _TIMEOUT_SECONDS

        def do_POST(self) -> None:
            try:
                status, answer = 200, reports.answer(self.path, self.headers.get("Authorization"), self._body())
            except PolluxError as error:
                status = error.http_status
                said = {"code": type(error).__name__, "message": str(error), "retryable": error.retryable}
                answer = {"error": said}
            self._send(status, answer)

        def _body(self) -> bytes:
            from pollux.wire.codec import MAX_BODY_BYTES

            length = self.headers.get("Content-Length") or ""
            if not length.isdigit() or int(length) > MAX_BODY_BYTES:
                self.close_connection = True
                raise TooLarge(f"the report's length is '{length}': give at most {MAX_BODY_BYTES} bytes")
            return self.rfile.read(int(length))

        def _send(self, status: int, answer: dict[str, Any]) -> None:
            import json

            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *values: Any) -> None:
            """Log nothing: the terminal is for the job's output."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    reports = ReportServer(server)
    thread = threading.Thread(target=server.serve_forever, daemon=True, name="pollux-reports")
    thread.start()
    try:
        yield reports
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
