"""Every socket at which processes of ours can be reached, as the kernel lists them, and bytes for each. Not a test.

Read from /proc alone, so that no list of ours can leave one out.
"""

import contextlib
import ipaddress
import json
import os
import random
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pollux.backends.shim.store.plain_protocol import OPENING
from pollux.wire.live.store_channel import GREETING

CONNECTIONS = int(os.environ.get("POLLUX_FAULT_EVENTS", "30"))
NOBODY = 65534
LOG_BYTES = 60_000
MEMORY_BYTES = 96 << 20
_LISTENS, _UNCONNECTED = "0A", "07"
_ACCEPTS = 0x10000
_PATIENCE_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Open:
    """A socket: "tcp", "udp" or "unix", where, and the process behind it."""

    kind: str
    where: tuple[str, int] | str
    process: int
    name: str


def ours(*marks: str) -> dict[int, str]:
    """Processes that have one of these words in their variables, command or open files, and what they started."""
    rows: dict[int, tuple[int, str]] = {}
    found: dict[int, str] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            name, _, rest = (folder / "stat").read_text().partition("(")[2].rpartition(")")
            rows[int(folder.name)] = int(rest.split()[1]), name
            if int(folder.name) != os.getpid() and any(mark in _words(folder) for mark in marks):
                found[int(folder.name)] = name
    while more := {child: row[1] for child, row in rows.items() if row[0] in found and child not in found}:
        found |= more
    return found


def _words(folder: Path) -> str:
    words = [(folder / name).read_bytes().decode(errors="replace") for name in ("environ", "cmdline")]
    for file in (folder / "fd").iterdir():
        with contextlib.suppress(OSError):
            words.append(os.readlink(file))
    return "\n".join(words)


def opened(processes: dict[int, str]) -> list[Open]:
    """Where these can be reached, each socket once."""
    owners: dict[str, int] = {}
    for process in sorted(processes):
        with contextlib.suppress(OSError):
            for file in Path(f"/proc/{process}/fd").iterdir():
                with contextlib.suppress(OSError):
                    owners.setdefault(os.readlink(file), process)
    found = []
    for kind, where, number in [*_internet(), *_unix()]:
        if (owner := owners.get(f"socket:[{number}]")) is not None:
            found.append(Open(kind, where, owner, processes[owner]))
    return found


def _internet() -> Iterator[tuple[str, tuple[str, int], str]]:
    for table, kind, state in (("tcp", "tcp", _LISTENS), ("tcp6", "tcp", _LISTENS), ("udp", "udp", _UNCONNECTED),
                               ("udp6", "udp", _UNCONNECTED)):  # fmt: skip
        with contextlib.suppress(OSError):
            for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                fields = row.split()
                if fields[3] == state:
                    yield kind, _address(fields[1]), fields[9]


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    words = [int(host[at : at + 8], 16) for at in range(0, len(host), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    found: Any = ipaddress.ip_address(packed)
    found = getattr(found, "ipv4_mapped", None) or found
    where = ("::1" if found.version == 6 else "127.0.0.1") if found.is_unspecified else str(found)
    return where, int(port, 16)


def _unix() -> Iterator[tuple[str, str, str]]:
    for row in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = row.split()
        # Those that only were made together, by socketpair, have no name and accept nobody.
        if int(fields[3], 16) & _ACCEPTS or len(fields) > 7:
            yield "unix", fields[7] if len(fields) > 7 else "", fields[6]


def roles(found: Sequence[Open], service: int = 0) -> set[str]:
    """What the sockets are, by whose they are; one that is in no list of ours is named by its process."""
    return {_role(each, service) for each in found}


def _role(each: Open, service: int) -> str:
    if each.kind == "unix":
        return "shim.sock" if str(each.where).endswith("shim.sock") else f"unix {each.name} {each.where}"
    if each.process == service:
        return f"service {each.kind}"
    is_replica = not each.name.startswith("pollux-") and (each.name == "python" or each.name.startswith("pollux:"))
    return f"{'replica' if is_replica else each.name} {each.kind}"


def places(found: Sequence[Open], home: Path, service: int = 0) -> list[Any]:
    """Where they can be reached, and what each is: the sockets of shims by their paths, whatever they were called."""
    where: list[Any] = [[each.kind, each.where, _role(each, service)] for each in found if each.kind != "unix"]
    return where + [["unix", str(path), "shim.sock"] for path in home.glob("**/run/*/shim.sock")]


def check_withstood(reached: dict[str, int], wanted: set[str], before: Any, folder: Path) -> None:
    """To be called while the job still runs: every kind of socket was tried, no process ended, and none has grown.

    `before` is what `sizes` said. A shim's socket lies in a folder that another user cannot enter.
    """
    closed = {"shim.sock"} if os.geteuid() == 0 else set()
    assert {role for role, count in reached.items() if count} == wanted - closed, reached
    memory, logs = before
    after, grown = sizes([*memory], folder)
    assert after.keys() == memory.keys(), f"processes ended: {memory.keys() - after.keys()}"
    assert {each for each in after if after[each] - memory[each] >= MEMORY_BYTES} == set(), (memory, after)
    assert grown - logs < LOG_BYTES


def sizes(processes: Sequence[int], folder: Path) -> tuple[dict[int, int], int]:
    """The memory of each process, and the bytes of all logs of ours below the folder but the replicas' own."""
    memory = {}
    for process in processes:
        with contextlib.suppress(OSError, IndexError):
            memory[process] = int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    logs = [path for path in folder.rglob("*.log") if "logs" not in path.parts]
    return memory, sum(path.stat().st_size for path in logs if path.exists())


def poke(sockets: Sequence[Any], seed: int) -> Any:
    """Connect to each of them, and say what might mean something, and what does not; how many let us, by what they are.

    To be called as a stranger: what comes back is only counted.
    """
    chance, reached = random.Random(seed), {role: 0 for _, _, role in sockets}
    for kind, where, role in sockets:
        for _ in range(CONNECTIONS):
            family = socket.AF_UNIX if kind == "unix" else socket.AF_INET6 if ":" in where[0] else socket.AF_INET
            with socket.socket(family, socket.SOCK_DGRAM if kind == "udp" else socket.SOCK_STREAM) as line:
                line.settimeout(1.0)
                try:
                    line.connect(where.replace("@", "\0", 1) if kind == "unix" else tuple(where[:2]))
                    reached[role] += 1
                    line.sendall(_bytes(chance))
                    line.settimeout(_PATIENCE_SECONDS)
                    while line.recv(1 << 16):
                        pass
                except (OSError, ValueError):
                    continue
    return reached


def _bytes(chance: random.Random) -> bytes:
    live = "/pollux/live"
    asked = json.dumps(
        {
            "nonce": "0" * 32,
            "proof": "0" * 32,
            "request": '["SessionRequest", {"session": "x", "seen": 0, "lease": 1.0}]',
        }
    )
    plain = OPENING + b"\1" + _text(f"{live}/committed") + _text("99999999999") + b"\7"
    known = [
        # Where the stranger is the same user after all, the store would do what PyTorch's own client says.
        GREETING + bytes(32), *([plain] if os.geteuid() == NOBODY else []),
        asked.encode() + b"\n", b"[" * 100_000 + b"\n",
        b'["StopRequest", {"generation": 99, "grace_seconds": 0.0}]\n',
        b'{"version": 4, "nonce": "00", "encrypts": true}\n[1, "[\\"KillAllRequest\\", {}]"]\n',
        b"POST /v1/shutdown HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 2\r\n\r\n{}",
        b"GET /v1/jobs HTTP/1.1\r\nHost: localhost\r\n\r\n",
        # What gloo says first: the number of a connection. One of these may be next.
        *(struct.pack("=q", number) for number in range(8)),
    ]  # fmt: skip
    return chance.choice([*known, chance.randbytes(chance.randrange(1, 3000))])


def _text(word: str) -> bytes:
    return struct.pack("=Q", len(word)) + word.encode()
