"""People who look at the cluster page, for `service.py`: what a page asks for when it is opened, and then again.

The page's script is `cluster.js`: it reads its files, what it shows and the timeline of a day at first; then it follows
the events, and after each of them it reads what it shows anew, each part at most so often and the timeline as far back
as anything ran. The figures here are those of the scripts; a test compares them.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
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
FEW_WATCHERS = 25
FIRST_SPAN_SECONDS, LEAST_SPAN_SECONDS, SOON_SECONDS = 86400.0, 30.0, 0.2
SPANS_SECONDS = (900.0, 3600.0, 21600.0, 86400.0)
EVENTS_RECALLED = 200
OPENED_WITHIN_SECONDS = 10.0
_LINKS = re.compile(rb'"(/static/[^"]+)"|from "\./([\w.]+)"')


def fitting(ran_seconds: float) -> float:
    """How far back the timeline goes where the first job began so long ago; the script's function of that name."""
    wanted = max(1.1 * ran_seconds, LEAST_SPAN_SECONDS)
    rounded = (span for span in SPANS_SECONDS if wanted > 600.0 and span >= 0.9 * wanted)
    return next(rounded, min(wanted, FIRST_SPAN_SECONDS))


def links(text: bytes) -> list[str]:
    """The files that a page or a script names."""
    found = ((page or b"/static/js/" + script).decode() for page, script in _LINKS.findall(text))
    return list(dict.fromkeys(found))


class Client:
    """One kept connection; a request at a time, as agents and the command line send them."""

    def __init__(self, port: int, token: str) -> None:
        self._port, self._token = port, token
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, method: str, path: str, body: bytes = b"", headers: str = "") -> tuple[int, bytes]:
        if self._writer is None or self._reader is None:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {self._token}\r\n{headers}"
        self._writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        status = int((await self._reader.readline()).split()[1])
        length, in_pieces = 0, False
        while (line := await self._reader.readline()) not in (b"\r\n", b""):
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
            in_pieces = in_pieces or name.lower() == b"transfer-encoding"
        return status, await (self._pieces(self._reader) if in_pieces else self._reader.readexactly(length))

    @staticmethod
    async def _pieces(reader: asyncio.StreamReader) -> bytes:
        found = []
        while size := int(await reader.readline(), 16):
            found.append((await reader.readexactly(size + 2))[:-2])
        await reader.readline()
        return b"".join(found)

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
        """So many pages, opened within ten seconds and left open."""
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
        self.revision = 0
        self.first = 0.0

    async def open(self, until: float) -> None:
        """Look until then."""
        await asyncio.sleep(self.crowd.random.uniform(0.0, OPENED_WITHIN_SECONDS))
        await self.opening()
        parts = [
            (self.overview, OVERVIEW_SECONDS, WITHOUT_EVENTS_SECONDS),
            (self.jobs, JOBS_SECONDS, WITHOUT_EVENTS_SECONDS),
            (self.timeline, TIMELINE_SECONDS, WITHOUT_EVENTS_SECONDS),
        ]
        signals = [asyncio.Event() for _ in parts]
        await asyncio.gather(
            self.follow(until, signals),
            self.recall(),
            self.fitted(),
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
        """Do it soon after each event, at most once per `every` seconds and never twice at a time."""
        while (left := until - time.monotonic()) > 0.0:
            with suppress(TimeoutError):
                await asyncio.wait_for(signal.wait(), min(left, at_least))
            if (began := time.monotonic()) >= until:
                break
            signal.clear()
            await work()
            await asyncio.sleep(max(min(began + every * self.pace, until) - time.monotonic(), 0.0))

    async def opening(self) -> None:
        """Everything until the page can be used: its files, who looks, what is shown, and the timeline of a day."""
        await self.files()
        await self.ask(self.other, "/v1/session")
        await asyncio.gather(self.overview(), self.jobs())
        answer = await self.read_timeline(FIRST_SPAN_SECONDS)
        now = time.time()
        begins = (job["intervals"][0][0] for job in json.loads(answer or b"{}").get("jobs", []) if job["intervals"])
        self.first = min(begins, default=now)

    async def files(self) -> None:
        """The page and all that it names, as of a browser that has none of it."""
        known = ["/"]
        for path in known:
            text = await self.ask(self.other, path)
            known += [name for name in links(text) if name not in known]

    async def recall(self) -> None:
        """What happened before, told once."""
        after = max(self.revision - EVENTS_RECALLED, 0)
        async with self.other_lock:
            await self.ask(self.other, "/v1/events?follow=false", f"Last-Event-ID: {after}\r\n")

    async def fitted(self) -> None:
        """The timeline once more, as far back as anything ran."""
        await asyncio.sleep(SOON_SECONDS)
        await self.timeline()

    async def overview(self) -> None:
        answers = await asyncio.gather(
            *(self.ask(client, path) for client, path in zip(self.clients, OVERVIEW, strict=True))
        )
        if answers[0]:
            self.revision = json.loads(answers[0])["revision"]
        if answers[1]:
            self.pace = max(1.0, json.loads(answers[1])["watchers"] / FEW_WATCHERS)

    async def jobs(self) -> None:
        async with self.other_lock:
            await self.ask(self.other, JOBS[0])

    async def timeline(self) -> None:
        await self.read_timeline(fitting(time.time() - self.first))

    async def read_timeline(self, span: float) -> bytes:
        now = time.time()
        since = max(now - 1.05 * span, 0.0)
        async with self.other_lock:
            return await self.ask(self.other, f"/v1/timeline?since={since:.1f}&until={now:.1f}&limit={TIMELINE_JOBS}")

    async def ask(self, client: Client, path: str, headers: str = "") -> bytes:
        answer = b""
        began = time.perf_counter()
        try:
            status, answer = await client.ask("GET", path, headers=headers)
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
