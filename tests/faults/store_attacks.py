"""What a stranger may try on the store of a job that runs, and how a test becomes one. Not a test.

Where the test is root, a stranger is another Unix user; elsewhere the same user without the job's secret, who may then
speak as PyTorch's own client does, and does not.
"""

import contextlib
import datetime
import json
import os
import random
import resource
import socket
import struct
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from pollux.agent.distributed.authenticated_store import AuthenticatedStore
from pollux.backends.shim.store.plain_protocol import OPENING
from pollux.testing.waiting import PATIENCE_SECONDS
from pollux.wire.live import keys
from pollux.wire.live.store_channel import GREETING, StoreAccess

IS_ROOT = os.geteuid() == 0
NOBODY = 65534
FUZZED = 20_000
_OPEN_FILES = 4096


def as_stranger(work: Callable[..., Any], *arguments: Any) -> Any:
    """What that returns in the stranger's process."""
    ours, theirs = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            most = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            if IS_ROOT:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            os.write(theirs, json.dumps(work(*arguments)).encode())
        except BaseException as error:
            os.write(theirs, json.dumps(f"{type(error).__name__}: {error}").encode())
        finally:
            os._exit(0)
    os.close(theirs)
    with open(ours, "rb") as said:
        text = said.read()
    os.waitpid(pid, 0)
    return json.loads(text)


def listeners() -> dict[str, int]:
    """The ports of this machine that somebody listens at, by socket, as any user can read them."""
    with open("/proc/net/tcp") as rows:
        fields = [row.split() for row in rows][1:]
    return {each[9]: int(each[1].rpartition(":")[2], 16) for each in fields if each[3] == "0A"}


def listening_ports() -> list[int]:
    """Those ports."""
    return [*listeners().values()]


@contextlib.contextmanager
def _connected(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS) as line:
        yield line


def _answer(line: socket.socket) -> bytes:
    """All that comes until the other side ends the connection."""
    heard = b""
    with contextlib.suppress(ConnectionError, BrokenPipeError):
        while piece := line.recv(1 << 16):
            heard += piece
    return heard


def _say(port: int, data: bytes) -> bytes:
    with _connected(port) as line:
        with contextlib.suppress(ConnectionError, BrokenPipeError):
            line.sendall(data)
        return _answer(line)


def _text(*parts: str) -> bytes:
    return b"".join(struct.pack("=Q", len(part)) + part.encode() for part in parts)


def write_keys(port: int) -> Any:
    """As PyTorch's own client: a plan, its commitment, a beat that no parser survives; and a question."""
    if not IS_ROOT:
        return ""
    live = f"/{keys.PREFIX}"
    wanted = {
        f"{live}/{keys.plan(2)}": json.dumps({"generation": 2, "before": 0, "members": [{"rank": 0, "was": None}]}),
        f"{live}/{keys.COMMITTED}": "99999999999",
        f"{live}/{keys.beat(0, 0)}": "[" * 100_000,
    }
    written = b"".join(b"\1" + _text(key, value) for key, value in wanted.items())
    return _say(port, OPENING + written + b"\x0d1234" + b"\7").hex()


def join(port: int) -> Any:
    """As a rank: with PyTorch's own client, and with ours and a secret that it guesses."""
    told = []
    tries: list[Callable[[], object]] = [
        lambda: AuthenticatedStore(StoreAccess("127.0.0.1", port, bytes(32)), 5.0),
    ]
    if IS_ROOT:
        limit = datetime.timedelta(seconds=2)
        tries.append(lambda: dist.TCPStore("127.0.0.1", port, 2, is_master=False, timeout=limit).add("pollux", 1))
    for attempt in tries:
        try:
            attempt()
        except dist.DistError:
            continue
        told.append("came in")
    return told


def guess(port: int) -> Any:
    """The whole greeting, and a proof that is none."""
    with _connected(port) as line:
        line.sendall(GREETING + bytes(32))
        line.recv(64, socket.MSG_WAITALL)
        line.sendall(bytes(32) + struct.pack("!I", 10) + bytes(42))
        return _answer(line).hex()


def replay(port: int, recorded: str) -> Any:
    """What a replica said before, byte for byte; what the store answers to its greeting says nothing."""
    return len(_say(port, bytes.fromhex(recorded))) <= 64


def too_much(port: int) -> Any:
    """Megabytes before a proof, and frames that would be longer than all memory."""
    frame = struct.pack("!I", 2**32 - 1) + bytes(32)
    heard = [_say(port, data) for data in (b"[" * 2_000_000, GREETING + bytes(32) + frame * 1000)]
    return max(map(len, heard)) <= 64


def slow(port: int) -> Any:
    """The greeting, a byte at a time, for as long as it is listened to."""
    with _connected(port) as line, contextlib.suppress(ConnectionError, BrokenPipeError):
        for number in range(len(GREETING) + 32):
            line.sendall((GREETING + bytes(32))[number : number + 1])
            time.sleep(0.3)
        return "listened to"
    return ""


def idle(port: int) -> Any:
    """A thousand connections that say nothing, until the store has ended all of them."""
    lines = []
    for _ in range(1000):
        with contextlib.suppress(OSError):
            lines.append(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS))
    return [len(lines) > 900, sum(len(_answer(line)) for line in lines)]


def fuzz(port: int, seed: int) -> Any:
    """Random bytes, alone and after the first bytes of either protocol."""
    chance, sent, most = random.Random(seed), 0, 0
    begins = [b"", GREETING, GREETING + bytes(32), *([OPENING] if IS_ROOT else [])]
    while sent < FUZZED:
        with _connected(port) as line, contextlib.suppress(ConnectionError, BrokenPipeError):
            line.sendall(chance.choice(begins))
            for _ in range(20):
                sent += 1
                line.sendall(chance.randbytes(chance.randrange(1, 300)))
            line.shutdown(socket.SHUT_WR)
            most = max(most, len(_answer(line)))
    return most <= 64


def recorded(access: StoreAccess) -> str:
    """All that a replica says which counts a key up, as somebody on its way would see it."""
    heard = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as relay:

        def carry() -> None:
            theirs, _ = relay.accept()
            with theirs, socket.create_connection((access.host, access.port)) as store:
                back = threading.Thread(target=_pass_on, args=(store, theirs, bytearray()))
                back.start()
                _pass_on(theirs, store, heard)
                store.shutdown(socket.SHUT_RDWR)
                back.join()

        thread = threading.Thread(target=carry)
        thread.start()
        through = StoreAccess(access.host, relay.getsockname()[1], access.secret)
        client = AuthenticatedStore(through, PATIENCE_SECONDS)
        assert client.add("counted", 1) == 1
        client.close()
        thread.join(PATIENCE_SECONDS)
    return bytes(heard).hex()


def _pass_on(source: socket.socket, sink: socket.socket, heard: bytearray) -> None:
    with contextlib.suppress(OSError):
        while piece := source.recv(1 << 16):
            heard += piece
            sink.sendall(piece)
