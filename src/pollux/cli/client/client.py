"""Requests and streams to the service over HTTP, with the standard library only; errors are `PolluxError` classes.

Answers are plain JSON values.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import ssl
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, quote, urlencode, urlsplit

from pollux.core import errors
from pollux.core.errors import Forbidden, InvalidInput, PolluxError, Unauthorised, Unreachable
from pollux.wire.socket_owners import check_server

__all__ = ["Client", "ServerEvent", "connect", "find_service", "job_path", "read_token"]

_TIMEOUT_SECONDS = 30.0
_STREAM_TIMEOUT_SECONDS = 60.0
_MAX_ANSWER_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """One event of the service's stream: its number, its kind and its data."""

    id: str
    kind: str
    data: Any


def job_path(job_id: str, *rest: str) -> str:
    """The path of a job, or of something below it."""
    return "/".join(("/v1/jobs", quote(job_id, safe=""), *rest))


def find_service(environ: Mapping[str, str], home: Path) -> str:
    """The address of the service, from POLLUX_SERVER or the file in its home; `Unreachable` if there is neither."""
    from pollux.wire import home_layout

    if environ.get("POLLUX_SERVER"):
        return environ["POLLUX_SERVER"]
    path = home_layout.service_file(home)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["url"]
    except FileNotFoundError:
        raise Unreachable(f"no service at home {home}: start one with 'pollux up', or set POLLUX_SERVER") from None
    except OSError as error:
        raise Unreachable(f"{path} cannot be read ({error.strerror}): set POLLUX_SERVER, or check its mode") from None
    except (ValueError, KeyError, TypeError):
        raise Unreachable(
            f"{path} does not say where the service is: it is damaged; restart the service with 'pollux up'"
        ) from None
    return str(found)


def read_token(environ: Mapping[str, str], home: Path) -> str | None:
    """The token to send, from POLLUX_TOKEN or the service's home; None if there is neither."""
    from pollux.wire import home_layout

    if environ.get("POLLUX_TOKEN"):
        return environ["POLLUX_TOKEN"].strip()
    path = home_layout.token_file(home)
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Unauthorised(f"the token in {path} cannot be read ({error.strerror}): set POLLUX_TOKEN") from None
    except UnicodeDecodeError:
        raise Unauthorised(f"{path} does not hold a token: it is not UTF-8 text; set POLLUX_TOKEN") from None


def connect(environ: Mapping[str, str] | None = None, timeout: float = _TIMEOUT_SECONDS) -> Client:
    """A client for the service that the environment names, else for the one of the default home."""
    from pollux.wire import home_layout

    environ = os.environ if environ is None else environ
    home = home_layout.home(environ)
    return Client(
        find_service(environ, home),
        read_token(environ, home),
        home_layout.ca_file(home),
        timeout,
        lambda: find_service(environ, home),
        lambda: _trusted_users(environ, home_layout.token_file(home)),
    )


def _trusted_users(environ: Mapping[str, str], token_file: Path) -> set[int]:
    """Who may serve us besides ourselves and root: who wrote the token that we send, and who is named as trusted."""
    users, named = set(), environ.get("POLLUX_SERVER_UID", "")
    if named:
        if not (named.isascii() and named.isdigit()):
            raise InvalidInput(f"POLLUX_SERVER_UID is '{named}': give a user's number, or unset it")
        users.add(int(named))
    if not environ.get("POLLUX_TOKEN"):
        with suppress(OSError):
            users.add(token_file.stat().st_uid)
    return users


class Client:
    """Requests to one service. `ca_file`, if it exists, is trusted beside the system's certificates.

    `find` returns the present address of the service; it is called when the known address refuses connections, or
    is served by a user of this machine who is not `trusted`.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        ca_file: Path | None = None,
        timeout: float = _TIMEOUT_SECONDS,
        find: Callable[[], str] | None = None,
        trusted: Callable[[], Collection[int]] = tuple,
    ) -> None:
        if token is not None and not (token.isascii() and token.isprintable()):
            raise InvalidInput("the token has characters that no token has: check POLLUX_TOKEN")
        self.url, self._parts = url.rstrip("/"), _address(url)
        self._token, self._ca_file, self._timeout = token, ca_file, timeout
        self._find, self._trusted = find, trusted
        self._skew = 0.0

    @property
    def now(self) -> float:
        """The service's time by its last answer, in seconds since 1970."""
        return time.time() + self._skew

    def get(self, path: str, **query: Any) -> dict[str, Any]:
        """The answer to a GET; query values that are None are left out."""
        return self._request("GET", _with(path, query))

    def post(self, path: str, body: Any = None, **query: Any) -> dict[str, Any]:
        """The answer to a POST of a JSON body."""
        return self._request("POST", _with(path, query), {} if body is None else body)

    def put(self, path: str, body: Any) -> dict[str, Any]:
        """The answer to a PUT of a JSON body."""
        return self._request("PUT", path, body)

    def submit(self, body: Any) -> dict[str, Any]:
        """Submit a job once: if the answer is lost on the way, the same request is sent again under the same key."""
        headers = {"Idempotency-Key": os.urandom(16).hex()}
        try:
            return self._request("POST", "/v1/jobs", body, headers)
        except Unreachable as error:
            if isinstance(error.__cause__, ConnectionRefusedError | socket.gaierror):
                raise
            return self._request("POST", "/v1/jobs", body, headers)

    def lines(self, path: str) -> Iterator[bytes]:
        """The lines of a long answer, as they come."""
        with self._open("GET", path, timeout=_STREAM_TIMEOUT_SECONDS) as answer:
            yield from _lines(answer, self.url)

    def events(self, last_id: str | None = None, timeout: float = _STREAM_TIMEOUT_SECONDS) -> Iterator[ServerEvent]:
        """Events from now on, or after `last_id`; ends when the service closes the stream."""
        headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": last_id} if last_id else {})
        with self._open("GET", "/v1/events", headers=headers, timeout=timeout) as answer:
            fields: dict[str, str] = {}
            for line in _lines(answer, self.url):
                text = line.decode("utf-8", "replace").rstrip("\r\n")
                if text and not text.startswith(":"):
                    name, _, value = text.partition(":")
                    value = value.removeprefix(" ")
                    fields[name] = f"{fields[name]}\n{value}" if name == "data" and "data" in fields else value
                elif not text and "data" in fields:
                    yield ServerEvent(fields.get("id", ""), fields.get("event", "message"), _loads(fields["data"]))
                    fields = {}

    def _request(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        with self._open(method, path, body, headers) as answer:
            try:
                raw = answer.read(_MAX_ANSWER_BYTES)
            except (OSError, http.client.HTTPException) as error:
                raise self._connection_error(error) from error
        value = _loads(raw)
        if not isinstance(value, dict):
            raise Unreachable(f"{self.url} did not answer as a Pollux service does: check the address")
        return value

    @contextmanager
    def _open(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> Iterator[http.client.HTTPResponse]:
        sent = {"Accept": "application/json", **(headers or {})}
        if self._token is not None:
            sent["Authorization"] = f"Bearer {self._token}"
        content = None
        if body is not None:
            content = json.dumps(body).encode()
            sent["Content-Type"] = "application/json"
        connection = self._open_connection(self._timeout if timeout is None else timeout)
        try:
            try:
                connection.request(method, self._parts.path.rstrip("/") + path, content, sent)
                answer = connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                raise self._connection_error(error) from error
            self._read_clock(answer.getheader("Date"))
            if answer.status >= 400:
                raise _error(answer.status, answer.read(2**20), self.url)
            yield answer
        finally:
            connection.close()

    def _open_connection(self, timeout: float) -> http.client.HTTPConnection:
        """An open connection; to the service's new address, if it has moved."""
        connection = self._connection(timeout)
        try:
            connection.connect()
            if self._parts.scheme == "http" and self._token is not None:
                check_server(connection.sock, self._trusted)
        except (OSError, http.client.HTTPException, PolluxError) as error:
            connection.close()
            may_have_moved = isinstance(error, ConnectionRefusedError | Unreachable)
            moved = self._find() if self._find is not None and may_have_moved else self.url
            if moved.rstrip("/") == self.url:
                raise error if isinstance(error, PolluxError) else self._connection_error(error) from error
            self.url, self._parts = moved.rstrip("/"), _address(moved)
            return self._open_connection(timeout)
        return connection

    def _connection(self, timeout: float) -> http.client.HTTPConnection:
        host, port = self._parts.hostname or "", self._parts.port
        if self._parts.scheme == "http":
            return http.client.HTTPConnection(host, port or 80, timeout=timeout)
        context = ssl.create_default_context()
        if self._ca_file is not None and self._ca_file.exists():
            try:
                context.load_verify_locations(self._ca_file)
            except (OSError, ssl.SSLError) as error:
                raise InvalidInput(f"{self._ca_file} holds no certificates ({error}): replace or remove it") from None
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        return http.client.HTTPSConnection(host, port or 443, timeout=timeout, context=context)

    def _connection_error(self, error: Exception) -> PolluxError:
        if isinstance(error, ConnectionRefusedError):
            return Unreachable(f"no service at {self.url}: start one with 'pollux up'")
        if isinstance(error, ssl.SSLCertVerificationError):
            return Unreachable(
                f"the certificate of {self.url} is not trusted ({error.verify_message}): "
                "put its authority in SSL_CERT_FILE, or in ca.pem in the home folder"
            )
        if isinstance(error, TimeoutError):
            return Unreachable(f"the service at {self.url} did not answer in time: see 'pollux doctor'")
        return Unreachable(f"the service at {self.url} cannot be talked to ({str(error) or type(error).__name__})")

    def _read_clock(self, date: str | None) -> None:
        if date is None:
            return
        try:
            skew = parsedate_to_datetime(date).timestamp() - time.time()
        except ValueError:
            return
        # The header has whole seconds: a difference of a few says nothing about the clocks.
        self._skew = skew if abs(skew) > 3.0 else 0.0


def _address(url: str) -> SplitResult:
    """The parts of an address; InvalidInput for any other text."""
    parts = urlsplit(url)
    try:
        known = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
    except ValueError:
        known = False
    if not known:
        raise InvalidInput(f"POLLUX_SERVER is '{url}': give an address such as http://127.0.0.1:7341")
    return parts


def _with(path: str, query: Mapping[str, Any]) -> str:
    given = {key: str(value).lower() if isinstance(value, bool) else value for key, value in query.items()}
    pairs = {key: value for key, value in given.items() if value is not None}
    return f"{path}?{urlencode(pairs)}" if pairs else path


def _lines(answer: http.client.HTTPResponse, url: str) -> Iterator[bytes]:
    try:
        while line := answer.readline():
            yield line
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise Unreachable(f"the service at {url} stopped answering ({str(error) or type(error).__name__})") from error


def _loads(raw: bytes | str) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return None


def _error(status: int, raw: bytes, url: str) -> PolluxError:
    """The error of an answer, as the class that the service raised; for an unknown class, by the HTTP status."""
    answer = _loads(raw)
    body = answer.get("error") if isinstance(answer, dict) else None
    if not isinstance(body, dict):
        return Unreachable(f"{url} answered {status}, but not as a Pollux service does: check the address")
    kind: Any = getattr(errors, str(body.get("code")), None)
    if not (isinstance(kind, type) and issubclass(kind, PolluxError)):
        by_status: Mapping[int, type[PolluxError]] = {401: Unauthorised, 403: Forbidden, 503: Unreachable}
        kind = by_status.get(status, InvalidInput if status < 500 else PolluxError)
    error: PolluxError = kind.__new__(kind)
    message = str(body.get("message") or f"the service answered {status}")
    Exception.__init__(error, message)
    return error
