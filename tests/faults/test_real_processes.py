"""Changed messages to a real shim and a real node daemon: the same processes go on, and so does what they run.

`POLLUX_FAULT_EVENTS` sets the number of messages (20 for each event), `POLLUX_FAULT_SEED` the seed.
"""

import contextlib
import json
import os
import random
import select
import socket
from pathlib import Path

import pytest
from tests.support.fleet import ProcessFleet

from pollux.backends.local import LocalBackend
from pollux.backends.process.proc import is_alive
from pollux.backends.process.records import read_record
from pollux.backends.transport import channel
from pollux.backends.transport.channel import SecureLine
from pollux.backends.transport.query import ask_host
from pollux.core.errors import BackendFailed
from pollux.testing.conformance.backends import Bench
from pollux.testing.jobs.replica_server import load_module
from pollux.testing.waiting import PATIENCE_SECONDS, wait_until
from pollux.wire.live.codec import MalformedValue, encode_tagged, to_plain
from pollux.wire.live.messages import StatusRequest, StopRequest, decode_message, encode_message
from pollux.wire.live.node_messages import EndRunnerRequest, SeeRequest, SessionRequest

FAULTS = Path(__file__).parent
mutations = load_module(str(FAULTS / "mutations.py"))
MESSAGES = load_module(str(FAULTS / "test_message_mutations.py"))
NUMBER = 20 * int(os.environ.get("POLLUX_FAULT_EVENTS", "10"))
SEED = int(os.environ.get("POLLUX_FAULT_SEED", "20223"))
SECRET = b"s" * 32
WAITS = "import pathlib, time\npathlib.Path('up').touch()\nwhile not pathlib.Path('end').exists(): time.sleep(0.02)"


def stops(text):
    """Whether it is a good order to stop, which a shim carries out: who can connect may order."""
    try:
        return isinstance(decode_message(text), StopRequest)
    except MalformedValue:
        return False


def test_a_shim_survives_what_its_own_user_says_and_runs_its_job(tmp_path):
    chance = random.Random(SEED)
    bench = Bench(tmp_path, lambda home: LocalBackend(home, slots=1, warm=False))
    bench.submit("job", WAITS)
    bench.wait("job", (bench.folder / "up").exists)
    folder = bench.home / "run" / "job"
    shim = read_record(folder / "shim.json")
    good = [json.loads(encode_message(each)) for each in MESSAGES.SHIM if not isinstance(each, StopRequest)]
    for text in mutations.texts(good, chance, NUMBER):
        if stops(text):
            continue
        with socket.socket(socket.AF_UNIX) as line, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            line.connect(str(folder / "shim.sock"))
            line.sendall(text.replace(b"\n", b" ") + b"\n" + encode_message(StatusRequest()))
            line.shutdown(socket.SHUT_WR)
            line.settimeout(PATIENCE_SECONDS)
            while line.recv(1 << 16):
                pass
        assert is_alive(shim["pid"], shim["start"]), text[:300]
    assert not bench.ends("job")
    (bench.folder / "end").touch()
    assert bench.end("job").outcome == "succeeded"
    bench.backend.forget("job")
    bench.wait("empty", lambda: not bench.backend.running())
    bench.backend.close()


@pytest.fixture
def fleet(tmp_path):
    made = ProcessFleet(tmp_path / "hosts", num_nodes=1, cold=True)
    made.start(SECRET, "127.0.0.1", lambda: None)
    wait_until("node", made.hosts)
    yield made
    made.close()
    made.kill_all()


def heard(line):
    """The first value that comes; None where the other side ends the connection."""
    while not line.broken:
        select.select([line.peer], [], [], PATIENCE_SECONDS)
        if values := line.get():
            return values[0]
    return None


def speak(address, secret, first, texts):
    """Greet a daemon with that secret and request, and say these texts where a runner's messages belong."""
    with socket.create_connection(address, timeout=PATIENCE_SECONDS) as peer, contextlib.suppress(BackendFailed):
        line = SecureLine(peer)
        channel.answer(secret, line, heard(line), first)
        if heard(line) is not None:
            for number, text in enumerate(texts, 1):
                line.put([number, text])
            line.put([len(texts) + 1, encode_tagged(EndRunnerRequest())])
            line.finish(1.0)


def test_a_daemon_survives_callers_with_and_without_the_secret(fleet):
    """Those with the secret may start and end replicas, so each has a session of its own; none ends the daemon."""
    chance = random.Random(SEED)
    address, pid = fleet.hosts()[0].address, fleet.pid(0)
    session = SessionRequest("odd", 0, 10.0, "n0")
    requests = [json.loads(encode_tagged(each)) for each in MESSAGES.REQUESTS]
    for number, first in enumerate(mutations.texts([to_plain(session)], chance, NUMBER)):
        with contextlib.suppress(ValueError, RecursionError):
            speak(address, SECRET if number % 2 else b"x" * 32, json.loads(first), ())
        with socket.create_connection(address, timeout=PATIENCE_SECONDS) as peer, contextlib.suppress(OSError):
            peer.sendall(first.replace(b"\n", b" ") + b"\n")
    for number in range(NUMBER // 10):
        texts = [each.decode(errors="replace") for each in mutations.texts(requests, chance, 10)]
        speak(address, SECRET, {**to_plain(session), "session": f"s-{number}"}, texts)
    assert (fleet.pid(0), ask_host(address, SECRET, SeeRequest(("/",))).seen) == (pid, (True,))
    assert "Traceback" not in (fleet.folder / "n0.log").read_text()
