"""The connections of a job's store: authenticates them, and answers their questions, in one thread.

A replica proves that it knows the job's secret, and gets authenticated frames (`pollux.wire.live.store_channel`).
PyTorch's own client, by which scripts make their groups themselves, can prove nothing: it gets answers if the kernel
says that its socket belongs to this user on this machine. Any other connection is closed without an answer.
"""

from __future__ import annotations

import collections
import hmac
import os
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pollux.backends.process.refusals import RefusalLog
from pollux.backends.shim.store import plain_protocol
from pollux.backends.shim.store.key_values import KeyValues, StoreRefusal, Waiter
from pollux.wire.live import store_channel
from pollux.wire.live.store_channel import BrokenFrame, FrameReader, FrameWriter, StoreOperation
from pollux.wire.socket_owners import owner_of

__all__ = ["StorePeers"]

_READ_BYTES = 1 << 18
_MAX_STRANGERS = 256
_MAX_STRANGER_BYTES = 4 << 10
_MAX_UNREAD_BYTES = 256 << 20
_STRANGER_SECONDS = 5.0
_ACCEPTS_A_TURN = 16
_FULL_SECONDS = 0.05
# The system call takes no timeout longer than a month.
_LONGEST_SECONDS = 3600.0
_REMEDY = (
    "it uses PyTorch's own store, which proves nothing, from another machine or user: put `from pollux.agent import "
    "init` before torch.distributed.init_process_group"
)


@dataclass(slots=True, eq=False)
class _Peer:
    """One connection. `until`: when it is closed unless it has proved itself; `late_at`: when its wait ends."""

    line: socket.socket
    where: tuple[str, int]
    hear: Callable[[_Peer, bytes], None]
    until: float
    rest: bytearray = field(default_factory=bytearray)
    out: bytearray = field(default_factory=bytearray)
    asked: bytes = b""
    answered: bytes = b""
    reader: FrameReader | None = None
    writer: FrameWriter | None = None
    waiter: Waiter | None = None
    late_at: float | None = None
    is_open: bool = True

    @property
    def is_member(self) -> bool:
        return self.until == float("inf")


class StorePeers:
    """The loop of a store with its `values`; its caller may have it watch other sockets, too."""

    def __init__(self, listener: socket.socket, secret: bytes, refusals: RefusalLog | None = None) -> None:
        listener.setblocking(False)
        self.values = KeyValues()
        self._listener = listener
        self._secret = secret
        self._log = refusals or RefusalLog("the job's store")
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._peers: dict[socket.socket, _Peer] = {}
        # Connections that have proved nothing yet, the oldest first.
        self._strangers: collections.OrderedDict[_Peer, None] = collections.OrderedDict()
        self._waiting: set[_Peer] = set()
        self._accept_at: float | None = None
        self._others: dict[socket.socket, Callable[[], None]] = {}

    def watch(self, other: socket.socket, hear: Callable[[], None]) -> None:
        """Call the function whenever the socket can be read."""
        self._others[other] = hear
        self._selector.register(other, selectors.EVENT_READ)

    def turn(self, seconds: float | None) -> None:
        """Wait for at most this time (None: without end), and serve all connections that are ready."""
        events = self._selector.select(self._patience(seconds))
        ready = [(self._peers.get(key.fileobj), key.fileobj, mask) for key, mask in events]  # type: ignore[call-overload]
        # Members come first, however many strangers are ready.
        for peer, source, mask in sorted(ready, key=lambda each: not (each[0] is None or each[0].is_member)):
            if peer is not None:
                self._attend(peer, mask)
            elif source in self._others:
                self._others[source]()
        if any(source is self._listener for _, source, _ in ready):
            self._accept()
        self._look(time.monotonic())

    def _patience(self, seconds: float | None) -> float:
        times = [each.late_at for each in self._waiting if each.late_at is not None]
        times += [each.until for each in [*self._strangers][:1]]
        if self._accept_at is not None:
            times.append(self._accept_at)
        left = [max(0.0, at - time.monotonic()) for at in times]
        return min([*left, _LONGEST_SECONDS, *([] if seconds is None else [seconds])])

    def _look(self, now: float) -> None:
        """Do what is due."""
        for peer in [each for each in self._waiting if each.late_at is not None and each.late_at <= now]:
            self._stop_waiting(peer)
            self._reply(peer, StoreOperation.LATE, ())
        while self._strangers and next(iter(self._strangers)).until <= now:
            peer = next(iter(self._strangers))
            self._refuse(peer, "slow", f"it had not proved itself after {_STRANGER_SECONDS:g} s")
        if self._accept_at is not None and self._accept_at <= now:
            self._accept_at = None
            self._selector.register(self._listener, selectors.EVENT_READ)

    # Connections

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_A_TURN):
            try:
                line, where = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                # This process has no more files: close the oldest connection that has proved nothing.
                self._make_room()
                self._selector.unregister(self._listener)
                self._accept_at = time.monotonic() + _FULL_SECONDS
                return
            line.setblocking(False)
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if len(self._strangers) >= _MAX_STRANGERS:
                self._make_room()
            peer = _Peer(line, where[:2], self._hear_stranger, time.monotonic() + _STRANGER_SECONDS)
            self._peers[line] = peer
            self._strangers[peer] = None
            self._selector.register(line, selectors.EVENT_READ)

    def _make_room(self) -> None:
        """Refuse the oldest connection that has proved nothing: replicas prove themselves within milliseconds."""
        if self._strangers:
            self._refuse(next(iter(self._strangers)), "crowd", "too many connections have not proved themselves")

    def _refuse(self, peer: _Peer, kind: str, why: str) -> None:
        self._log.refuse(peer.line, peer.where, kind, why)
        self._drop(peer)

    def _drop(self, peer: _Peer) -> None:
        if peer.is_open:
            peer.is_open = False
            self._stop_waiting(peer)
            self._strangers.pop(peer, None)
            self._selector.unregister(peer.line)
            del self._peers[peer.line]
            peer.line.close()

    def _attend(self, peer: _Peer, mask: int) -> None:
        if peer.is_open and mask & selectors.EVENT_WRITE:
            self._flush(peer)
        if not (peer.is_open and mask & selectors.EVENT_READ):
            return
        try:
            piece = peer.line.recv(_READ_BYTES if peer.is_member else _MAX_STRANGER_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            piece = b""
        if not piece:
            if not peer.is_member and peer.rest:
                self._log.refuse(peer.line, peer.where, "left", "it left before it had proved itself")
            self._drop(peer)
            return
        try:
            peer.hear(peer, piece)
        except (ValueError, LookupError, OverflowError) as error:
            # `BrokenFrame`, and any other error that unexpected bytes can cause.
            self._refuse(peer, "broken" if peer.is_member else "stranger", f"it sent {error}")

    def _send(self, peer: _Peer, data: bytes) -> None:
        if peer.is_open:
            peer.out += data
            self._flush(peer)

    def _flush(self, peer: _Peer) -> None:
        try:
            while peer.out:
                del peer.out[: peer.line.send(peer.out[:_READ_BYTES])]
        except (BlockingIOError, InterruptedError):
            if len(peer.out) > _MAX_UNREAD_BYTES:
                self._refuse(peer, "unread", f"it left {len(peer.out)} bytes of answers unread")
                return
        except OSError:
            self._drop(peer)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.out else 0)
        if self._selector.get_key(peer.line).events != events:
            self._selector.modify(peer.line, events)

    # Connections that have proved nothing yet

    def _hear_stranger(self, peer: _Peer, piece: bytes) -> None:
        # The first bytes show what it is, so that never more than one read is kept.
        peer.rest += piece
        begin = bytes(peer.rest[: len(store_channel.GREETING)])
        if begin == store_channel.GREETING:
            self._greet(peer)
        elif bytes(peer.rest[: len(plain_protocol.OPENING)]) == plain_protocol.OPENING:
            self._admit_plain(peer)
        elif not (store_channel.GREETING.startswith(begin) or plain_protocol.OPENING.startswith(begin)):
            raise BrokenFrame("what no replica sends first")

    def _greet(self, peer: _Peer) -> None:
        """Read a replica's nonce, prove that this is the job's store, and check the replica's proof."""
        begin = len(store_channel.GREETING)
        end = begin + store_channel.NONCE_BYTES
        if not peer.asked and len(peer.rest) >= end:
            peer.asked, peer.answered = bytes(peer.rest[begin:end]), store_channel.nonce()
            ours = store_channel.proof(self._secret, b"store", peer.asked, peer.answered)
            self._send(peer, peer.answered + ours)
        if not peer.asked or len(peer.rest) < end + store_channel.CODE_BYTES:
            return
        theirs = bytes(peer.rest[end : end + store_channel.CODE_BYTES])
        wanted = store_channel.proof(self._secret, b"replica", peer.asked, peer.answered)
        if not hmac.compare_digest(theirs, wanted):
            self._refuse(peer, "proof", "it does not know the job's secret")
            return
        peer.reader, peer.writer = store_channel.frames(self._secret, b"store", peer.asked, peer.answered)
        rest = bytes(peer.rest[end + store_channel.CODE_BYTES :])
        self._take_in(peer, self._hear_replica)
        self._hear_replica(peer, rest)

    def _admit_plain(self, peer: _Peer) -> None:
        if owner_of(peer.where, peer.line.getsockname()) != os.geteuid():
            self._refuse(peer, "plain", _REMEDY)
            return
        rest = bytes(peer.rest[len(plain_protocol.OPENING) :])
        self._take_in(peer, self._hear_plain)
        self._hear_plain(peer, rest)

    def _take_in(self, peer: _Peer, hear: Callable[[_Peer, bytes], None]) -> None:
        self._strangers.pop(peer, None)
        peer.until = float("inf")
        peer.rest.clear()
        peer.hear = hear

    # Members

    def _hear_replica(self, peer: _Peer, piece: bytes) -> None:
        assert peer.reader is not None
        for body in peer.reader.feed(piece):
            operation, parts = store_channel.unpack(body)
            if peer.waiter is not None:
                raise BrokenFrame("a question before the last one was answered")
            seconds: float | None = None
            if operation in (StoreOperation.GET, StoreOperation.MULTI_GET, StoreOperation.WAIT):
                seconds = _seconds(parts)
            self._answer(peer, operation, parts, seconds)

    def _hear_plain(self, peer: _Peer, piece: bytes) -> None:
        peer.rest += piece
        while peer.is_open:
            question = plain_protocol.read_question(peer.rest)
            if question is None:
                return
            del peer.rest[: question.size]
            if question.operation is not None and peer.waiter is not None:
                raise BrokenFrame("a question before the last one was answered")
            if question.operation is not None:
                self._answer(peer, question.operation, question.parts, None)
            elif question.ping:
                self._send(peer, question.ping)
            else:
                self._stop_waiting(peer)
                self._send(peer, plain_protocol.CANCEL)

    def _answer(self, peer: _Peer, operation: StoreOperation, parts: list[bytes], seconds: float | None) -> None:
        """Answer a question; one about missing keys waits for them, for at most this time."""
        waits = operation in (StoreOperation.GET, StoreOperation.MULTI_GET, StoreOperation.WAIT)
        try:
            if waits and not self.values.has(parts):
                peer.waiter = self.values.wait(parts, lambda: self._found(peer, operation, parts))
                peer.late_at = None if seconds is None else time.monotonic() + seconds
                self._waiting.add(peer)
            else:
                self._reply(peer, operation, self._do(operation, parts))
        except StoreRefusal as error:
            if peer.writer is None:
                raise BrokenFrame(str(error)) from None
            self._send(peer, peer.writer.frame(store_channel.pack(StoreOperation.REFUSED, [str(error).encode()])))
        except (ValueError, IndexError) as error:
            raise BrokenFrame(f"a question without a meaning: {error}"[:200]) from None

    def _do(self, operation: StoreOperation, parts: Sequence[bytes]) -> list[bytes]:
        values = self.values
        match operation:
            case StoreOperation.SET | StoreOperation.MULTI_SET:
                for key, value in zip(parts[::2], parts[1::2], strict=True):
                    values.set(key, value)
            case StoreOperation.GET | StoreOperation.MULTI_GET:
                return [values.get(key) or b"" for key in parts]
            case StoreOperation.ADD:
                return [b"%d" % values.add(parts[0], int(parts[1]))]
            case StoreOperation.CHECK:
                return [b"%d" % values.has(parts)]
            case StoreOperation.COMPARE_SET:
                return [values.compare_set(parts[0], parts[1], parts[2])]
            case StoreOperation.DELETE:
                return [b"%d" % values.delete(parts[0])]
            case StoreOperation.COUNT:
                return [b"%d" % len(values)]
            case StoreOperation.APPEND:
                values.append(parts[0], parts[1])
        return []

    def _found(self, peer: _Peer, operation: StoreOperation, parts: list[bytes]) -> None:
        self._stop_waiting(peer)
        self._reply(peer, operation, self._do(operation, parts))

    def _stop_waiting(self, peer: _Peer) -> None:
        self._waiting.discard(peer)
        if peer.waiter is not None:
            self.values.forget(peer.waiter)
            peer.waiter = peer.late_at = None

    def _reply(self, peer: _Peer, operation: StoreOperation, parts: Sequence[bytes]) -> None:
        if peer.writer is None:
            self._send(peer, plain_protocol.answer_of(operation, parts))
            return
        done = operation if operation is StoreOperation.LATE else StoreOperation.DONE
        try:
            self._send(peer, peer.writer.frame(store_channel.pack(done, parts)))
        except BrokenFrame as error:
            # Refused here, since the caller may be another connection, which wrote the awaited key.
            self._refuse(peer, "answer", f"it asked for too much at once: {error}")


def _seconds(parts: list[bytes]) -> float:
    """Take the first part of a question, which is how long it waits; in seconds."""
    try:
        return min(max(int(parts.pop(0)), 0), 10**12) / 1000.0
    except (ValueError, IndexError):
        raise BrokenFrame("a question without its timeout") from None
