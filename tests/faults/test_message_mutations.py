"""Random fields of random messages between our processes: none ends a process, none changes what it may not change.

`POLLUX_FAULT_EVENTS` sets the number of messages (500 for each event), `POLLUX_FAULT_SEED` the seed.
"""

import contextlib
import hashlib
import json
import logging
import os
import random
import socket
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
from starlette.testclient import TestClient

from pollux.agent.checkpoint import manifest as manifests
from pollux.backends.dispatch.job_table import DispatchedJob, HeldGeneration, JobTable
from pollux.backends.dispatch.shim_events import ShimEvents
from pollux.backends.dispatch.site import Site
from pollux.backends.node_daemon.job_runner import NodeJobRunner
from pollux.backends.process import proc
from pollux.backends.process.select_loop import SelectLoop
from pollux.backends.ray import driver_messages as ray_messages
from pollux.backends.ray.driver_messages import (
    ConnectedMessage,
    DesireNodes,
    DriverMessage,
    DriverOrder,
    DriverRequest,
    FailedMessage,
    FreeClaims,
    GrantedMessage,
    HostGoneMessage,
    HostMessage,
    HostReport,
    NodesMessage,
    ReleaseHosts,
    RetryClaims,
    TakeClaims,
    TroubleMessage,
    UnreachableMessage,
    WaitsMessage,
    WellMessage,
)
from pollux.backends.ray.nodes import RayNode
from pollux.backends.ray.options import RayOptions
from pollux.backends.ray.provider import RayNodeProvider
from pollux.backends.shim import live_generation as live_module
from pollux.backends.shim.remote_launcher import RemoteLauncher
from pollux.backends.shim.service_connections import ServiceConnections
from pollux.backends.shim.store import host_messages, plain_protocol
from pollux.backends.shim.store import peers as peers_module
from pollux.backends.shim.store.host_messages import FoundMessage, SetRequest, WatchRequest
from pollux.backends.shim.store.peers import StorePeers
from pollux.backends.transport import channel as channel_module
from pollux.backends.transport.channel import Channel, SecureLine
from pollux.core.errors import BackendFailed, CheckpointDamaged, CheckpointMismatch, InvalidInput, PolluxError
from pollux.service import create_app
from pollux.testing.jobs.replica_server import load_module
from pollux.testing.servers.service import SAMPLE_MODEL, sample_report
from pollux.testing.waiting import PATIENCE_SECONDS
from pollux.wire.codec import encode as to_json
from pollux.wire.live import store_channel
from pollux.wire.live.codec import MalformedValue, decode, encode, encode_tagged, from_plain, to_plain
from pollux.wire.live.heartbeat import Activity, Heartbeat, PauseReport
from pollux.wire.live.messages import (
    AlarmMessage,
    EndedMessage,
    FleetAccess,
    ForkserverMessage,
    ForkShimRequest,
    LaunchOrder,
    LaunchRequest,
    LostMessage,
    NodeGoneRequest,
    NodeLeavingMessage,
    NodeSilentMessage,
    RefusedMessage,
    ReleaseRequest,
    ResizeRequest,
    ShimMessage,
    ShimRequest,
    StartedMessage,
    StatusMessage,
    StatusRequest,
    StopRequest,
    decode_message,
    encode_message,
)
from pollux.wire.live.node_messages import (
    ClearMessage,
    ClearRequest,
    ConnectionHandover,
    EndRunnerRequest,
    ExitMessage,
    ForkedMessage,
    HelloMessage,
    KillAllRequest,
    KillRequest,
    NodeNoticeMessage,
    OutputMessage,
    OverMemoryMessage,
    PingRequest,
    PongMessage,
    ProvenRequest,
    RunnerMessage,
    RunnerRequest,
    SeenMessage,
    SeeRequest,
    SessionGreeting,
    SessionRequest,
    StartReplicaRequest,
    SweepRequest,
    SweptMessage,
    TerminateRequest,
    decode_daemon_request,
    decode_runner_message,
    decode_runner_request,
)
from pollux.wire.live.plan import GenerationPlan, PlanMember
from pollux.wire.live.store_channel import StoreOperation

UNIT = Path(__file__).parents[1] / "unit"

mutations = load_module(str(Path(__file__).with_name("mutations.py")))
LIVE = load_module(str(UNIT / "backends" / "shim" / "test_live_generation.py"))
EVENTS_OF_SHIMS = load_module(str(UNIT / "backends" / "dispatch" / "test_shim_events.py"))
WORLD = load_module(str(UNIT / "service" / "conftest.py")).World
EVENTS = int(os.environ.get("POLLUX_FAULT_EVENTS", "6"))
SEED = int(os.environ.get("POLLUX_FAULT_SEED", "20219"))
MESSAGES = 500 * EVENTS
SECRET = b"s" * 32

FLEET = FleetAccess("5a" * 32, "10.0.0.1", {"n0": ("10.0.0.2", 4000)}, 10.0, 12.0)
ORDER = LaunchOrder(
    "job", 2, ("python", "train.py"), "/tmp", {"A": "1"}, ({"RANK": "0"},), ((0, 1),), ("n0/0",), "run", False, 30.0,
    1e9, "/tmp/logs", 1 << 20, True, 30.0, {"n0/0": 0}, FLEET, 900.0,
)  # fmt: skip
LOST = LostMessage(1.0, 2, (0, 1), ("n0/0",), "it hung")
ENDED = {"at": 1.0, "job_id": "job", "generation": 2, "outcome": "crashed", "exits": [[0, 1, 1.0]], "detail": "x"}
PAUSE = PauseReport(0.3, "grow", 17, 1 << 20, {"regroup": 0.1})
SHIM = (
    LaunchRequest(ORDER), ResizeRequest(ORDER), StopRequest(2, 30.0), NodeGoneRequest("n0", "gone"), ReleaseRequest(),
    StatusRequest(), LOST, StartedMessage(1.0, 2, ("n0/0",), PAUSE), StatusMessage(True, 2, lost=LOST, ended=ENDED),
    EndedMessage(ENDED), AlarmMessage(1.0, "it lives", 0), NodeLeavingMessage("n0", "leaves"),
    NodeSilentMessage("n0", "silent"), RefusedMessage(1.0, 3, "the store refused somebody"),
)  # fmt: skip
START = StartReplicaRequest("1", ("python",), "/tmp", {"A": "1"}, (0,), False, 1e9, 1.0)
REQUESTS = (
    PingRequest(), TerminateRequest("1", True), KillRequest("1"), SweepRequest("1"), KillAllRequest(),
    ClearRequest(1, False),
)  # fmt: skip
MESSAGES_OF_RUNNER = (
    PongMessage(), NodeNoticeMessage(), ForkedMessage("1", 77), OutputMessage("1", b"text\n"),
    ExitMessage("1", 1, False, False), OverMemoryMessage("1", 1e9), SweptMessage("1"), ClearMessage(1),
)  # fmt: skip
REQUESTS_OF_SERVICE = (
    DriverOrder("ab", "pollux:x:", claims={"pollux:x:job:n0:1": "n0"}, desired=DesireNodes(2, True, 4)),
    TakeClaims({"pollux:x:job:n0:1": "n0"}), FreeClaims(("pollux:x:job:n0:1",)), RetryClaims(("pollux:x:job:n0:1",)),
    DesireNodes(None), ReleaseHosts(),
)  # fmt: skip
MESSAGES_OF_DRIVER = (
    NodesMessage((RayNode("ab", "n0", "10.0.0.2", 4, "H100", 8.0, 0.0, False),), {"n0": "why"}),
    HostMessage("n0", HostReport(("10.0.0.2", 4000), (0, 1))), HostGoneMessage("n0", "ended"),
    GrantedMessage("pollux:x:job:n0:1", "1"), WaitsMessage("pollux:x:job:n0:1"),
    FailedMessage("pollux:x:job:n0:1", "no"), ConnectedMessage("2"), UnreachableMessage("no"), WellMessage(),
    TroubleMessage(),
)  # fmt: skip
REQUESTS_OF_STORE = (SetRequest("plan/2", "{}"), WatchRequest("now", ("beat/1/0",), 0.5, True))
SESSION, GREETING = SessionRequest("a-1", 3, 10.0, "n0"), SessionGreeting(True, 3, "b")
BEAT = Heartbeat(3, 1.0, Activity.TRAINING, 0.5, False, "", 1)
VIEWS = ("/v1/jobs", "/v1/summary", "/metrics", "/v1/status", "/v1/jobs/odd", "/v1/jobs/odd/explain", "/v1/jobs/good")
PLAN = GenerationPlan(2, 1, (PlanMember(0, 1), PlanMember(1, None)), senders=(0,))


def tagged(*messages: object) -> list[Any]:
    return [json.loads(encode_tagged(message)) for message in messages]


@pytest.fixture
def chance() -> random.Random:
    return random.Random(SEED)


READERS = {
    "heartbeats": (Heartbeat.decode, [json.loads(BEAT.encode())], encode),
    "plans": (GenerationPlan.decode, [json.loads(PLAN.encode())], encode),
    "pauses": (lambda text: from_plain(PauseReport, json.loads(text)), [to_plain(PAUSE)], encode),
    "the shim and the service": (decode_message, tagged(*SHIM), encode_tagged),
    "to a runner": (decode_runner_request, tagged(START, *REQUESTS), encode_tagged),
    "of a runner": (decode_runner_message, tagged(*MESSAGES_OF_RUNNER), encode_tagged),
    "to the driver of Ray": (ray_messages.decode_request, tagged(*REQUESTS_OF_SERVICE), encode_tagged),
    "of the driver of Ray": (ray_messages.decode_message, tagged(*MESSAGES_OF_DRIVER), encode_tagged),
    "to a daemon": (decode_daemon_request, tagged(SESSION, SeeRequest(("/a", "/b"))), encode_tagged),
    "hellos": (partial(decode, HelloMessage), [channel_module.hello("0" * 32)], encode),
    "proofs": (partial(decode, ProvenRequest), [to_plain(ProvenRequest("0", "[]", "1"))], encode),
    "what is seen": (partial(decode, SeenMessage), [to_plain(SeenMessage((True, False)))], encode),
    "connections": (partial(decode, ConnectionHandover), [to_plain(ConnectionHandover("k", "a:1", SESSION))], encode),
    "of the fork server": (partial(decode, ForkserverMessage), [to_plain(ForkserverMessage(True))], encode),
    "to the fork server": (partial(decode, ForkShimRequest), [to_plain(ForkShimRequest("/a"))], encode),
    "to a store's host": (host_messages.decode_request, tagged(*REQUESTS_OF_STORE), encode_tagged),
    "of a store's host": (host_messages.decode_found, tagged(FoundMessage("beat/1/0", "{}")), encode_tagged),
    "greetings": (lambda text: from_plain(SessionGreeting, json.loads(text)), [to_plain(GREETING)], encode),
}  # fmt: skip


@pytest.mark.parametrize("what", READERS)
def test_a_message_is_read_or_refused(chance, what):
    """What is read is what its sender could have said: it can be said again."""
    read, values, write = READERS[what]
    refusals = (MalformedValue, *([] if what in ("heartbeats", "plans") else [ValueError, RecursionError]))
    for text in mutations.texts(values, chance, MESSAGES):
        found = mutations.read_or_refused(read, refusals, text)
        if found is not None:
            write(found)


@pytest.mark.parametrize(
    ("examples", "union"),
    [
        (SHIM, ShimRequest | ShimMessage),
        ((START, *REQUESTS, EndRunnerRequest()), RunnerRequest),
        (MESSAGES_OF_RUNNER, RunnerMessage),
        (REQUESTS_OF_SERVICE, DriverOrder | DriverRequest),
        (MESSAGES_OF_DRIVER, DriverMessage),
    ],
)
def test_every_kind_of_message_is_tried(examples, union):
    assert {type(message) for message in examples} == set(get_args(union))


def test_a_deep_beat_is_refused():
    with pytest.raises(MalformedValue):
        Heartbeat.decode(mutations.DEEP)


@pytest.fixture
def loop() -> Iterator[SelectLoop]:
    made = SelectLoop()
    yield made
    made.close()


def test_a_shim_hears_on_whatever_is_said(chance, loop, capsys):
    """Each request is obeyed, or told to be unknown; the next one is answered."""
    obeyed, unknown = [], []
    listener = socket.socket(socket.AF_UNIX)

    def obey(request: Any) -> StatusMessage:
        obeyed.append(request)
        return StatusMessage(False, None)

    services = ServiceConnections(listener, loop, obey, lambda: unknown.append(1))
    ours, theirs = socket.socketpair()
    services.add(theirs)
    ours.settimeout(PATIENCE_SECONDS)
    try:
        for text in mutations.texts(tagged(*SHIM), chance, MESSAGES):
            line = text.replace(b"\n", b" ")
            before = len(obeyed) + len(unknown)
            ours.sendall(line + b"\n")
            while len(obeyed) + len(unknown) == before:
                loop.turn(0.0)
            if obeyed:
                ours.recv(1 << 16)
                obeyed.clear()
        ours.sendall(encode_message(StatusRequest()))
        loop.turn(0.0)
        assert obeyed == [StatusRequest()]
    finally:
        ours.close()
        services.close()
    capsys.readouterr()


def test_the_service_hears_every_shim_out_whatever_one_says(chance, tmp_path, caplog):
    """What a shim says that can be read and makes no sense is told in the log, and its next message counts."""
    caplog.set_level(logging.CRITICAL, "pollux.backends")
    told: list[Any] = []
    table: Any = JobTable(EVENTS_OF_SHIMS.Slots(), told.append)
    events = ShimEvents(table, Any, Site())
    values = tagged(*(message for message in SHIM if not type(message).__name__.endswith("Request")))
    for text in mutations.texts(values, chance, MESSAGES):
        held = HeldGeneration(2, sent=True, live=True)
        message = mutations.read_or_refused(decode_message, (MalformedValue,), text)
        job = DispatchedJob("job", tmp_path, newest=2, now=held)
        said = [[] if message is None else [message], [StartedMessage(1.0, 2)]]
        job.link = type("Link", (), {"warm": None, "receive": lambda self, said=said: said.pop(0)})()
        told.clear()
        events.read_messages(job)
        events.read_messages(job)
        assert told, text


def test_a_shim_follows_its_replicas_whatever_they_write(chance, monkeypatch, capsys):
    """Keys of every kind with other values: they are heard, ignored, or the job is started anew from its checkpoint."""
    guarded = (OSError, PolluxError, ValueError, TypeError, LookupError)
    monkeypatch.setattr(live_module.time, "monotonic", lambda: 0.0)
    live = LIVE.alive()
    kinds = ("ready", "here", "received", "done", "saves", "beat", "failed", "door", "ends", "nothing")
    values = [json.loads(BEAT.encode()), json.loads(encode(PAUSE)), 1, "text"]
    for number, text in enumerate(mutations.texts(values, chance, MESSAGES)):
        if number % 50 == 0:
            live = LIVE.alive()
            LIVE.beat(live, 1, 0)
            LIVE.beat(live, 1, 1)
            LIVE.move(live, "2", "3")
        key = f"{chance.choice(kinds)}/{chance.choice((1, 1, 2, 2, 3, 10**17))}/{chance.choice((0, 1, 2, 99, 10**8))}"
        words = text.decode(errors="replace")
        mutations.read_or_refused(partial(live.key_found, key), guarded, words)
        live.act_on_due()
    capsys.readouterr()


# The channel between a shim and a node's host


def test_a_host_hears_nobody_without_the_secret(chance):
    """What a stranger says first, and what a shim says in other bytes."""
    nonce = channel_module.challenge()
    request = encode_tagged(SessionRequest("s-1", 0, 10.0, "n0"))
    proof = channel_module.proof(SECRET, "shim", nonce, "0" * 32, request)
    good = to_plain(ProvenRequest("0" * 32, request, proof))
    left, right = socket.socketpair()
    with left, right:
        for text in mutations.texts([good], chance, MESSAGES):
            line = SecureLine(right)
            left.sendall(text.replace(b"\n", b" ") + b"\n")
            said: list[Any] = []
            while not said and not line.broken:
                said = line.get()
            if said and said[0] != good:
                with contextlib.suppress(BackendFailed):
                    heard = channel_module.check(SECRET, SecureLine(left), nonce, said[0])
                    assert {**good, **said[0]} == said[0], "a field that is not proved"
                    assert heard == request, text
            left.setblocking(True)


def test_a_shim_believes_no_host_without_the_secret(chance):
    left, right = socket.socketpair()
    with left, right:
        for text in mutations.texts([channel_module.hello("0" * 32)], chance, MESSAGES):
            line = SecureLine(right)
            left.sendall(text.replace(b"\n", b" ") + b"\n" + b'[1, "[\\"PongMessage\\", {}]"]\n')
            said = line.get()
            assert said == []
            assert line.broken
            left.setblocking(True)


@pytest.mark.parametrize("way", ["to a runner", "of a runner"])
def test_what_is_said_after_the_proof_is_a_message_or_refused(chance, loop, capsys, monkeypatch, way):
    """Authentic, and with another field: neither side of the channel chokes on it."""
    # A runner ends all children of its process, which here are those of other tests.
    monkeypatch.setattr(proc, "descendants", lambda root, table: [])
    values = tagged(*(REQUESTS if way == "to a runner" else MESSAGES_OF_RUNNER))
    launcher = RemoteLauncher(replace(FLEET, nodes={}), loop)
    link = _link(launcher)
    control, other = socket.socketpair()
    runner = NodeJobRunner(1e9, control, None, {}, "boot", SECRET)
    heard: Channel[Any] = Channel(decode_runner_request if way == "to a runner" else decode_runner_message)
    number = 0
    with control, other:
        for text in mutations.texts(values, chance, MESSAGES):
            number += 1
            value = [heard.seen + 1, text.decode(errors="replace")]
            for message in heard.take([mutations.mutated(value, chance) if number % 7 == 0 else value]):
                if way == "to a runner" and not isinstance(message, StartReplicaRequest):
                    runner._carry_out(message)
                elif way == "of a runner":
                    launcher._take(link, message)
            if number % 100 == 0:
                capsys.readouterr()
    launcher.events.clear()


def _link(launcher: RemoteLauncher) -> Any:
    from pollux.backends.shim.node_link import NodeLink

    return NodeLink("n0", ("10.0.0.2", 4000), "session")


# The job's store


@pytest.fixture
def store(monkeypatch) -> Iterator[StorePeers]:
    """A store at a loopback port, whose kernel takes everybody for another user."""
    monkeypatch.setattr(peers_module, "owner_of", lambda theirs, ours: 65534)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        made = StorePeers(listener, SECRET)
        made.address = listener.getsockname()
        made.values.set(b"pollux/live/committed", b"1")
        yield made
        for peer in [*made._peers.values()]:
            made._drop(peer)
        made._selector.close()


def proved(store: StorePeers) -> tuple[socket.socket, Any]:
    """A connection of somebody who knows the secret, and what writes its frames."""
    line = socket.create_connection(store.address)
    asked = store_channel.nonce()
    line.sendall(store_channel.GREETING + asked)
    for _ in range(3):
        store.turn(0.01)
    answered = line.recv(64, socket.MSG_WAITALL)[: store_channel.NONCE_BYTES]
    line.sendall(store_channel.proof(SECRET, b"replica", asked, answered))
    store.turn(0.01)
    return line, store_channel.frames(SECRET, b"replica", asked, answered)[1]


def test_strangers_change_no_key(chance, store, capsys):
    """The greeting and PyTorch's own protocol, in other bytes, with frames of another secret behind."""
    _, writer = store_channel.frames(b"t" * 32, b"replica", bytes(32), bytes(32))
    frame = writer.frame(store_channel.pack(StoreOperation.SET, [b"pollux/live/committed", b"99999999999"]))
    begins = [
        store_channel.GREETING + bytes(64) + frame,
        plain_protocol.OPENING + b"\1" + _text("/pollux/live/committed", "2") + b"\7",
        plain_protocol.OPENING + b"\x0d1234",
    ]
    for _ in range(MESSAGES):
        with socket.create_connection(store.address) as line:
            with contextlib.suppress(ConnectionError):
                line.sendall(mutations.spoilt(chance.choice(begins), chance)[:100_000])
            line.shutdown(socket.SHUT_WR)
            for _ in range(4):
                store.turn(0.0)
        assert store.values.get(b"pollux/live/committed") == b"1"
        assert len(store.values) == 1
    for _ in range(300):
        store.turn(0.0)
    line, writer = proved(store)
    with line:
        line.sendall(writer.frame(store_channel.pack(StoreOperation.SET, [b"mine", b"2"])))
        store.turn(0.1)
        assert store.values.get(b"mine") == b"2"
    assert len(capsys.readouterr().err) < 20_000


def _text(*parts: str) -> bytes:
    return b"".join(len(part).to_bytes(8, "little") + part.encode() for part in parts)


def test_a_replica_that_says_nonsense_harms_its_own_connection_only(chance, store, capsys):
    """It has the secret, and its frames have other operations, counts and parts."""
    other, others = proved(store)
    line, writer = proved(store)
    questions = [
        (StoreOperation.SET, [b"a", b"1"]), (StoreOperation.GET, [b"0", b"a"]), (StoreOperation.ADD, [b"n", b"1"]),
        (StoreOperation.CHECK, [b"a", b"b"]), (StoreOperation.WAIT, [b"0", b"a"]), (StoreOperation.DELETE, [b"a"]),
        (StoreOperation.COMPARE_SET, [b"a", b"1", b"2"]), (StoreOperation.COUNT, []),
        (StoreOperation.APPEND, [b"a", b"x"]),
        (StoreOperation.MULTI_GET, [b"0", b"a", b"b"]), (StoreOperation.MULTI_SET, [b"a", b"1", b"b", b"2"]),
        (StoreOperation.DONE, []), (StoreOperation.REFUSED, [b"why"]),
    ]  # fmt: skip
    for number in range(MESSAGES):
        operation, parts = chance.choice(questions)
        body = store_channel.pack(operation, parts)
        if chance.random() < 0.5:
            parts = [mutations.spoilt(part, chance)[:5000] if part else b"x" for part in parts]
            body = store_channel.pack(chance.choice([*StoreOperation]), parts)
        else:
            body = mutations.spoilt(body, chance)[:5000]
        try:
            line.sendall(writer.frame(body))
            store.turn(0.0)
            store.turn(0.0)
            line.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                if not line.recv(1 << 20):
                    raise ConnectionError
            line.setblocking(True)
        except ConnectionError:
            line.close()
            line, writer = proved(store)
        if number % 500 == 0:
            store.values.set(b"pollux/live/committed", b"1")
    other.sendall(others.frame(store_channel.pack(StoreOperation.SET, [b"mine", b"2"])))
    for _ in range(3):
        store.turn(0.01)
    assert store.values.get(b"mine") == b"2"
    line.close()
    other.close()
    capsys.readouterr()


# Files, lines and reports


@pytest.fixture
def world(tmp_path) -> Iterator[Any]:
    made = WORLD(tmp_path)
    yield made
    made.engine.stop("keep")


def test_no_report_takes_the_view_of_all_jobs_away(chance, world):
    """Each is taken or refused, and what people look at is shown."""
    for name in ("good", "odd"):
        world.submit(name)
    good = to_json(sample_report(1, 10.0, model=SAMPLE_MODEL))
    app = create_app(world.engine, world.tokens)
    with TestClient(app, base_url="http://127.0.0.1:7341", raise_server_exceptions=False) as client:
        client.headers |= {"Authorization": f"Bearer {world.tokens.operator}", "Content-Type": "application/json"}
        for number, text in enumerate(mutations.texts([good], chance, MESSAGES // 5)):
            status = client.post("/v1/jobs/odd/reports", content=text).status_code
            assert status in (200, 400, 409, 413, 422, 429), (status, text)
            if number % 50 == 0:
                shown = {path: client.get(path).status_code for path in VIEWS}
                assert set(shown.values()) == {200}, (shown, text)


def test_a_manifest_that_is_sealed_and_wrong_is_damaged(chance):
    digest = manifests.FileDigest(3, "0" * 64)
    fields = dict.fromkeys(manifests.Manifest.__dataclass_fields__)
    good = {**fields, "format": manifests.FORMAT, "files": {"a": asdict(digest)}}
    wrong = (CheckpointDamaged, CheckpointMismatch)
    for text in mutations.texts([good], chance, MESSAGES):
        mutations.read_or_refused(lambda text: manifests.decode(sealed(text)), wrong, text)
        mutations.read_or_refused(manifests.decode, wrong, text)


def sealed(text: bytes) -> bytes:
    """With the checksum of its own, as somebody would write it who means harm."""
    body = text[1:]
    return b"%b%b%b%b" % (manifests._OPENING, hashlib.sha256(body).hexdigest().encode(), manifests._CLOSING, body)


def test_a_line_of_rays_driver_is_heard_or_the_driver_is_started_again(chance, tmp_path):
    """Whatever it says, what nodes there are can be asked for afterwards."""
    lender = RayNodeProvider(tmp_path, RayOptions(), command=("true",))
    expected = (MalformedValue, InvalidInput)
    for text in mutations.texts(tagged(*MESSAGES_OF_DRIVER), chance, MESSAGES):
        mutations.read_or_refused(lender._link._hear_line, expected, text)
        lender.hosts()
        lender.leaving()
        lender.warnings()
