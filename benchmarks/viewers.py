"""People who look at the cluster page, for `service.py`: what an open page asks for, as often as it does.

The page's script is `cluster.js`: it follows the events, and after each of them it reads what it shows anew, each part
at most so often. The figures here are those of the script; a test compares them.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

QUEUE_SHOWN, JOBS_SHOWN, TIMELINE_JOBS = 40, 100, 120
OVERVIEW = (
    "/v1/status",
    "/v1/summary",
    f"/v1/jobs?state=queued&limit={QUEUE_SHOWN}",
    f"/v1/jobs?state=paused&limit={QUEUE_SHOWN}",
)
JOBS = (f"/v1/jobs?active=true&limit={JOBS_SHOWN}",)
OVERVIEW_SECONDS, JOBS_SECONDS, TIMELINE_SECONDS, WITHOUT_EVENTS_SECONDS = 1.5, 2.5, 4.0, 10.0
SPAN_SECONDS = 3600.0
FEW_WATCHERS = 25


class Client:
    """One kept connection; a request at a time, as agents and the command line send them."""

    def __init__(self, port: int, token: str) -> None:
        self._port, self._token = port, token
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        if self._writer is None or self._reader is None:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {self._token}\r\n"
        self._writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        status = int((await self._reader.readline()).split()[1])
        length = 0
        while (line := await self._reader.readline()) not in (b"\r\n", b""):
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        return status, await self._reader.readexactly(length)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class Crowd:
    """How all viewers fared together."""

    def __init__(self, port: int, token: str, seed: int) -> None:
        self.port, self.token, self.random = port, token, random.Random(seed)
        self.messages = self.drops = self.errors = self.received_bytes = 0
        self.lags_ms: list[float] = []
        self.took_ms: list[float] = []

    async def watch(self, viewers: int, until: float) -> None:
        """So many pages, opened within two seconds and left open."""
        await asyncio.gather(*(Page(self).open(until) for _ in range(viewers)))


class Page:
    """One open page."""

    def __init__(self, crowd: Crowd) -> None:
        self.crowd = crowd
        # As many connections as the page has requests under way at most; a browser would not open more beside a stream.
        self.clients = [Client(crowd.port, crowd.token) for _ in OVERVIEW]
        self.other = Client(crowd.port, crowd.token)
        self.other_lock = asyncio.Lock()
        self.pace = 1.0

    async def open(self, until: float) -> None:
        """Look until then."""
        await asyncio.sleep(self.crowd.random.uniform(0.0, 2.0))
        parts = [
            (self.overview, OVERVIEW_SECONDS, WITHOUT_EVENTS_SECONDS),
            (self.jobs, JOBS_SECONDS, WITHOUT_EVENTS_SECONDS),
            (self.timeline, TIMELINE_SECONDS, WITHOUT_EVENTS_SECONDS),
        ]
        signals = [asyncio.Event() for _ in parts]
        await asyncio.gather(
            self.follow(until, signals),
            *(self.again(*part, signal, until) for part, signal in zip(parts, signals, strict=True)),
        )
        for client in (*self.clients, self.other):
            client.close()

    async def again(
        self,
        work: Callable[[], Awaitable[None]],
        every: float,
        at_least: float,
        signal: asyncio.Event,
        until: float,
    ) -> None:
        """Do it at once, then soon after each event, at most once per `every` seconds and never twice at a time."""
        while (began := time.monotonic()) < until:
            signal.clear()
            await work()
            left = until - time.monotonic()
            with suppress(TimeoutError):
                await asyncio.wait_for(signal.wait(), max(min(left, at_least), 0.0))
            await asyncio.sleep(max(min(began + every * self.pace, until) - time.monotonic(), 0.0))

    async def overview(self) -> None:
        answers = await asyncio.gather(
            *(self.ask(client, path) for client, path in zip(self.clients, OVERVIEW, strict=True))
        )
        if answers[1]:
            self.pace = max(1.0, json.loads(answers[1])["watchers"] / FEW_WATCHERS)

    async def jobs(self) -> None:
        async with self.other_lock:
            await self.ask(self.other, JOBS[0])

    async def timeline(self) -> None:
        now = time.time()
        since = now - 1.05 * SPAN_SECONDS
        async with self.other_lock:
            await self.ask(self.other, f"/v1/timeline?since={since:.1f}&until={now:.1f}&limit={TIMELINE_JOBS}")

    async def ask(self, client: Client, path: str) -> bytes:
        answer = b""
        began = time.perf_counter()
        try:
            status, answer = await client.ask("GET", path)
            self.crowd.errors += status != 200
            self.crowd.received_bytes += len(answer)
        except (OSError, asyncio.IncompleteReadError, ValueError, IndexError):
            self.crowd.errors += 1
        self.crowd.took_ms.append((time.perf_counter() - began) * 1e3)
        return answer

    async def follow(self, until: float, signals: Sequence[asyncio.Event]) -> None:
        """The stream of events; comes back where it ends."""
        crowd = self.crowd
        while time.monotonic() < until:
            reader, writer = await asyncio.open_connection("127.0.0.1", crowd.port)
            head = f"GET /v1/events HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {crowd.token}\r\n\r\n"
            writer.write(head.encode())
            try:
                while (left := until - time.monotonic()) > 0:
                    line = await asyncio.wait_for(reader.readline(), left)
                    if not line:
                        crowd.drops += 1
                        break
                    if line.startswith(b"data:"):
                        crowd.messages += 1
                        crowd.lags_ms.append((time.time() - json.loads(line[5:])["at"]) * 1e3)
                        for signal in signals:
                            signal.set()
            except TimeoutError:
                pass
            writer.close()
