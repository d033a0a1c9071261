"""A shim's launcher on another machine: a real host, and connections between the two that break or go silent."""

import contextlib
import json
import os
import resource
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from tests.support.fleet import ProcessFleet

from pollux.backends.fleet.shared_folders import SharedFolders
from pollux.backends.node_daemon.daemon import SECRET_VARIABLE, main
from pollux.backends.process import proc
from pollux.backends.process.fork_replica import ReplicaStart
from pollux.backends.process.select_loop import SelectLoop
from pollux.backends.shim.remote_launcher import NodeLeaving, NodeLoss, RemoteExit, RemoteLauncher
from pollux.backends.transport import channel
from pollux.backends.transport.channel import SecureLine, challenge, check
from pollux.backends.transport.query import ask_host
from pollux.core.errors import BackendFailed, InvalidInput
from pollux.testing.waiting import PATIENCE_SECONDS
from pollux.wire.live.codec import encode_tagged, to_plain
from pollux.wire.live.messages import FleetAccess
from pollux.wire.live.node_messages import ExitMessage, ForkedMessage, SeeRequest, SessionGreeting

SECRET = secrets.token_bytes(32)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    made = ProcessFleet(tmp_path_factory.mktemp("hosts"), num_nodes=1, cold=True)
    made.start(SECRET, "127.0.0.1", lambda: None)
    until(lambda: made.hosts())
    yield made
    made.kill_all()


def until(is_so, seconds=PATIENCE_SECONDS):
    deadline = time.monotonic() + seconds
    while not (found := is_so()):
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.005)
    return found


class Proxy:
    """Stands between shim and host: `cut` breaks connections, `mute` holds what flows in one of the directions back."""

    def __init__(self, target):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self._target = target
        self._pairs = []
        self.mute = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near = self._listener.accept()[0]
                far = socket.create_connection(self._target)
                self._pairs += [near, far]
                for way, source, sink in (("there", near, far), ("back", far, near)):
                    threading.Thread(target=self._pass, args=(way, source, sink), daemon=True).start()

    def _pass(self, way, source, sink):
        # One that is killed with something unread resets the connection, which recv raises.
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                while way in self.mute:
                    time.sleep(0.01)
                sink.sendall(piece)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def cut(self):
        for each in self._pairs:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._pairs = []

    def close(self):
        self.mute.clear()
        # Who waits in accept would take one more.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()


class Shim:
    """The loop that a shim would run around its launcher."""

    def __init__(self, address, lease=10.0, lost=12.0, secret=SECRET, node="n0"):
        self.loop = SelectLoop()
        self.launcher = RemoteLauncher(FleetAccess(secret.hex(), "127.0.0.1", {node: address}, lease, lost), self.loop)
        self.told, self.texts = [], {}

    def start(self, code, memory=0.0, place="n0/0"):
        parts: list[bytes] = []
        start = ReplicaStart(("python", "-uc", code), "/tmp", {"PATH": os.defpath}, (), False)
        process = self.launcher.start(start, place, memory, parts.append)
        self.texts[process.key] = parts
        return process

    def text(self, process):
        return b"".join(self.texts[process.key]).decode()

    def until(self, is_so, seconds=PATIENCE_SECONDS):
        deadline = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < deadline, (self.told, self.launcher.false_alarms)
            due = self.launcher.due()
            for call in self.loop.ready(0.05 if due is None else min(0.05, due)):
                call()
            self.launcher.keep_connections()
            self.told += self.launcher.events
            self.launcher.events.clear()

    def ended(self, process):
        self.until(lambda: any(isinstance(each, RemoteExit) and each.process is process for each in self.told))
        return next(each for each in self.told if isinstance(each, RemoteExit) and each.process is process)

    def close(self):
        self.launcher.kill_all()
        self.until(lambda: self.launcher.is_clear(kill=True))
        self.launcher.release()
        self.loop.close()


@pytest.fixture
def proxy(fleet):
    made = Proxy(fleet.hosts()[0].address)
    yield made
    made.close()


@pytest.fixture
def make_shim(fleet, proxy):
    made = []

    def make(**more):
        made.append(Shim(proxy.address, **more))
        return made[-1]

    yield make
    proxy.mute.clear()
    for shim in made:
        shim.close()


def test_a_replica_is_started_read_and_collected(make_shim):
    shim = make_shim()
    good, bad = shim.start("print('hello')"), shim.start("raise SystemExit(7)")
    assert (shim.ended(good).code, shim.ended(bad).code) == (0, 7)
    assert (shim.text(good), good.up) == ("hello\n", True)
    assert good.pid > 0


def test_signals_reach_it_and_its_children_end_with_it(make_shim):
    shim = make_shim()
    code = "import subprocess, time; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); time.sleep(600)"
    first, second = shim.start(code), shim.start(code)
    shim.until(lambda: shim.text(first) and shim.text(second))
    assert shim.launcher.terminate(first, True)
    exit_ = shim.ended(first)
    assert (exit_.code, exit_.asked) == (-signal.SIGTERM, True)
    shim.launcher.kill(second)
    assert shim.ended(second).code == -signal.SIGKILL
    shim.until(lambda: shim.launcher.is_clear(kill=True))
    for process in (first, second):
        until(lambda process=process: proc.start_time(int(shim.text(process))) is None)


def test_nothing_is_lost_when_the_connection_breaks(make_shim, proxy):
    shim = make_shim()
    code = "import time\nfor n in range(400): print(n, flush=True); time.sleep(0.002)"
    process = shim.start(code)
    for count in (20, 100, 250):
        shim.until(lambda count=count: shim.text(process).count("\n") >= count)
        proxy.cut()
    assert shim.ended(process).code == 0
    assert shim.text(process) == "".join(f"{n}\n" for n in range(400))
    assert [each for each in shim.told if isinstance(each, NodeLoss)] == []


@pytest.mark.parametrize("ways", [{"there"}, {"back"}], ids=["deaf", "dumb"])
def test_a_silent_node_ends_what_it_runs_before_it_is_given_up(make_shim, proxy, ways):
    """Also where only one direction is silent: what counts is what the shim has confirmed."""
    shim = make_shim(lease=6.0, lost=9.0)
    process = shim.start("import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    shim.until(lambda: shim.text(process).endswith("\n"))
    proxy.mute |= ways
    shim.until(lambda: shim.told and isinstance(shim.told[-1], NodeLoss))
    lost = shim.told[-1]
    assert (lost.processes, lost.node, lost.silent) == ((process,), "n0", True)
    assert "no answer" in lost.why
    assert proc.start_time(int(shim.text(process))) is None
    assert shim.launcher.is_clear(kill=True)
    # What is begun there meanwhile must not be taken for what was given up.
    again = shim.start("import time; print('again', flush=True); time.sleep(4); print('and still')")
    proxy.mute.clear()
    shim.until(lambda: shim.launcher.false_alarms)
    assert shim.ended(again).code == 0
    assert shim.text(again) == "again\nand still\n"


def test_a_runner_that_was_ended_is_noticed_at_once(make_shim, fleet):
    shim = make_shim(lease=50.0, lost=60.0)
    process = shim.start("import os, time; print(os.getppid(), flush=True); time.sleep(600)")
    shim.until(lambda: shim.text(process).endswith("\n"))
    os.kill(int(shim.text(process)), signal.SIGKILL)
    shim.until(lambda: shim.told)
    assert (shim.told[0].processes, shim.told[0].silent) == ((process,), False)


def test_what_a_node_hears_of_its_end_is_passed_on_once(make_shim):
    shim = make_shim()
    saves = "import os, signal, sys, time; signal.signal(15, lambda *_: (print('saved', flush=True), sys.exit(143)))"
    process = shim.start(f"{saves}; print(os.getppid(), flush=True); time.sleep(600)")
    shim.until(lambda: shim.text(process).endswith("\n"))
    runner = int(shim.text(process))
    for _ in range(2):
        os.kill(runner, signal.SIGTERM)
    shim.until(lambda: shim.told)
    assert shim.told == [NodeLeaving("n0", "node 'n0' is taken back by its engine", is_ending=True)]
    shim.launcher.terminate(process, True)
    exit_ = shim.ended(process)
    assert (exit_.code, exit_.asked) == (143, True)
    # What it printed takes another way than the news of its end.
    shim.until(lambda: shim.text(process).split()[1:] == ["saved"])
    assert len(shim.told) == 2


def test_an_end_by_the_engines_signal_comes_after_its_notice(make_shim):
    """It signals one process after another, and one without a handler is gone before its runner hears of it."""
    shim = make_shim()
    process = shim.start("import os, time; print(os.getpid(), os.getppid(), flush=True); time.sleep(600)")
    shim.until(lambda: shim.text(process).endswith("\n"))
    for pid in map(int, shim.text(process).split()):
        os.kill(pid, signal.SIGTERM)
        time.sleep(0.02)
    exit_ = shim.ended(process)
    assert [type(each) for each in shim.told] == [NodeLeaving, RemoteExit]
    assert (exit_.code, exit_.asked) == (-signal.SIGTERM, True)


def test_an_end_by_a_signal_of_nobody_is_told_without_a_notice(make_shim):
    shim = make_shim()
    process = shim.start("import os, signal; os.kill(os.getpid(), signal.SIGTERM)")
    exit_ = shim.ended(process)
    assert (exit_.code, exit_.asked, len(shim.told)) == (-signal.SIGTERM, False, 1)


def test_who_ends_well_at_the_engines_signal_was_asked_to(make_shim):
    """Otherwise it would seem to be done."""
    shim = make_shim()
    saves = "import os, signal, time; signal.signal(15, lambda *_: os._exit(0))"
    process = shim.start(f"{saves}; print(os.getppid(), os.getpid(), flush=True); time.sleep(600)")
    shim.until(lambda: shim.text(process).endswith("\n"))
    for pid in map(int, shim.text(process).split()):
        os.kill(pid, signal.SIGTERM)
    exit_ = shim.ended(process)
    assert [type(each) for each in shim.told] == [NodeLeaving, RemoteExit]
    assert (exit_.code, exit_.asked) == (0, True)


def test_a_patient_host_leaves_the_signal_to_those_it_was_meant_for(tmp_path):
    announced = tmp_path / "n0.json"
    words = ["--node", "n0", "--places", "1", "--announce", str(announced), "--cold", "--with-parent", "--patient"]
    command = [sys.executable, "-m", "pollux.backends.node_daemon.daemon", *words]
    secret = {**os.environ, SECRET_VARIABLE: SECRET.hex()}
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=secret) as host:
        until(announced.exists)
        host.send_signal(signal.SIGTERM)
        told = json.loads(announced.read_text())
        assert ask_host((told["address"], told["port"]), SECRET, SeeRequest(("/",)), 10.0).seen == (True,)
        host.stdin.close()
        assert host.wait(PATIENCE_SECONDS) == 0


def test_a_node_that_its_engine_has_as_gone_and_that_answers_is_told_and_not_killed(make_shim):
    shim = make_shim(lease=500.0, lost=600.0)
    saves = "import os, signal, sys, time; signal.signal(15, lambda *_: (print('saved', flush=True), sys.exit(143)))"
    process = shim.start(f"{saves}; print('up', flush=True); time.sleep(600)")
    shim.until(lambda: shim.text(process).endswith("\n"))
    for _ in range(2):
        shim.told.clear()
        shim.launcher.node_is_gone("n0", "node 'n0' is gone")
        shim.until(lambda: shim.told)
        assert shim.told == [NodeLeaving("n0", "node 'n0' is gone, and it answers: its jobs can save", is_ending=False)]
    shim.launcher.terminate(process, True)
    exit_ = shim.ended(process)
    assert (exit_.code, exit_.asked, shim.text(process).split()) == (143, True, ["up", "saved"])


def test_a_node_that_its_engine_has_as_gone_and_where_nobody_listens_is_lost_at_once(make_shim, proxy):
    shim = make_shim(lease=500.0, lost=600.0)
    process = shim.start("print('up', flush=True); import time; time.sleep(600)")
    shim.until(lambda: shim.text(process).endswith("\n"))
    proxy.close()
    shim.until(lambda: shim.launcher._links["n0"].stage != "open")
    assert shim.told == [], "a connection may break"
    shim.launcher.node_is_gone("n0", "node 'n0' is gone")
    shim.until(lambda: shim.told)
    assert shim.told == [NodeLoss((process,), "n0", "node 'n0' is gone")]
    assert shim.launcher.is_clear(kill=False)


def test_a_node_that_its_engine_has_as_gone_and_that_is_silent_is_lost_after_as_long_as_any(make_shim, proxy):
    shim = make_shim(lease=4.0, lost=6.0)
    process = shim.start("print('up', flush=True); import time; time.sleep(600)")
    shim.until(lambda: shim.text(process).endswith("\n"))
    proxy.mute.update(("there", "back"))
    shim.launcher.node_is_gone("n0", "node 'n0' is gone")
    shim.until(lambda: shim.told)
    assert [(type(each), each.silent) for each in shim.told] == [(NodeLoss, True)]


def test_a_node_that_nobody_knows_is_lost_at_once(make_shim):
    shim = make_shim()
    process = shim.start("pass", place="gone:elsewhere/0")
    shim.until(lambda: shim.told)
    assert shim.told[0].processes == (process,)
    assert "'elsewhere' is gone" in shim.told[0].why


def test_a_host_of_another_fleet_is_not_used(make_shim):
    shim = make_shim(secret=b"another secret, as long as that", lease=0.5, lost=1.0)
    shim.start("print('never')")
    shim.until(lambda: shim.told)
    assert isinstance(shim.told[0], NodeLoss)


def test_a_host_whose_greeting_says_nothing_is_not_used():
    def greet():
        with contextlib.suppress(OSError):
            while True:
                with listener.accept()[0] as peer:
                    line, nonce = SecureLine(peer), challenge()
                    line.put(channel.hello(nonce))
                    check(SECRET, line, nonce, until(line.get)[0])
                    line.encrypt()
                    line.put({"known": "perhaps", "seen": 0, "boot": ""})
                    line.finish(PATIENCE_SECONDS)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=greet)
        thread.start()
        shim = Shim(listener.getsockname(), lease=0.5, lost=1.0)
        shim.start("print('never')")
        shim.until(lambda: shim.told)
        assert "known is 'perhaps'" in shim.told[0].why
        shim.launcher.release()
        shim.loop.close()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_host_that_says_all_at_once_what_comes_after_a_proof_is_not_believed():
    """Whoever gets at the port of a host that is gone could say that replicas have ended well, and read commands."""
    heard: list[bytes] = []

    def pretend():
        with contextlib.suppress(OSError):
            while True:
                with listener.accept()[0] as peer:
                    greeting = to_plain(SessionGreeting(False, 0, "boot"))
                    ended = encode_tagged(ExitMessage("1", 0, asked=False, lacks_memory=False))
                    hello = channel.hello(challenge())
                    said = [hello, greeting, [1, encode_tagged(ForkedMessage("1", 1))], [2, ended]]
                    peer.sendall("".join(json.dumps(line) + "\n" for line in said).encode())
                    peer.settimeout(1.0)
                    with contextlib.suppress(TimeoutError):
                        while piece := peer.recv(1 << 20):
                            heard.append(piece)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=pretend, daemon=True)
        thread.start()
        shim = Shim(listener.getsockname(), lease=0.5, lost=1.0)
        process = shim.start("print('a secret of the job')")
        shim.until(lambda: shim.told)
        assert [type(each) for each in shim.told] == [NodeLoss]
        assert shim.told[0].processes == (process,)
        shim.launcher.release()
        shim.loop.close()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(PATIENCE_SECONDS)
    assert b"a secret of the job" not in b"".join(heard)


def test_too_much_memory_is_told(make_shim):
    shim = make_shim()
    process = shim.start("x = bytearray(300 << 20); print('there'); import time; time.sleep(600)", memory=100 << 20)
    shim.until(lambda: shim.launcher.over_memory({3: process}, 100 << 20))
    number, used = shim.launcher.over_memory({3: process}, 100 << 20)
    assert number == 3
    assert used > 100 << 20


def test_strangers_do_not_disturb_a_host(fleet):
    address = fleet.hosts()[0].address
    deep = b"[" * 60_000 + b"\n"
    asked = b'{"nonce": 1, "request": "{}", "proof": "x"}\n'
    for said in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 100_000, b"{}\n", asked, deep, b"1\n" * 10_000):
        with socket.create_connection(address, timeout=PATIENCE_SECONDS) as stranger, contextlib.suppress(OSError):
            stranger.sendall(said)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(4096):
                pass
    with pytest.raises(BackendFailed, match="refused"):
        ask_host(address, b"x" * 32, SeeRequest(("/",)))
    assert ask_host(address, SECRET, SeeRequest(("/", "/absent"))).seen == (True, False)
    log = (fleet.folder / "n0.log").read_text()
    assert "the node's host refused 127.0.0.1:" in log
    assert log.count("\n") < 20


def test_a_crowd_of_strangers_keeps_no_shim_out(fleet):
    address = fleet.hosts()[0].address
    crowd = [socket.create_connection(address, timeout=PATIENCE_SECONDS) for _ in range(300)]
    try:
        assert ask_host(address, SECRET, SeeRequest(("/",))).seen == (True,)
    finally:
        for line in crowd:
            line.close()


def test_a_host_without_files_lets_those_go_who_prove_nothing(tmp_path):
    """It neither turns in a circle nor waits for their time to be over."""
    fleet = ProcessFleet(tmp_path / "hosts", num_nodes=1, cold=True)
    fleet.start(SECRET, "127.0.0.1", lambda: None)
    try:
        address = until(fleet.hosts)[0].address
        host = fleet.pid(0)
        used = len(os.listdir(f"/proc/{host}/fd"))
        resource.prlimit(host, resource.RLIMIT_NOFILE, (used + 20, used + 20))
        with contextlib.ExitStack() as crowd:
            for _ in range(100):
                crowd.enter_context(socket.create_connection(address, timeout=PATIENCE_SECONDS))
            until(lambda: "there are no more files for connections" in (fleet.folder / "n0.log").read_text())
            assert until(lambda: seen(address)) == (True,)
    finally:
        fleet.kill_all()


def seen(address):
    try:
        return ask_host(address, SECRET, SeeRequest(("/",))).seen
    except BackendFailed:
        return None


def test_who_is_led_to_another_node_of_the_fleet_is_not_served(fleet):
    address = fleet.hosts()[0].address
    with pytest.raises(BackendFailed, match="refused"):
        ask_host(address, SECRET, SeeRequest(("/",), "n1"))
    with pytest.raises(BackendFailed, match="refused"):
        ask_host(address, SECRET, SeeRequest(("/",), ["n0"]))
    # Slurm's nodes have the pilot's name behind their own where two pilots have one node.
    assert ask_host(address, SECRET, SeeRequest(("/",), "n0")).seen == (True,)
    shim = Shim(address, lease=0.5, lost=1.0, node="n1")
    shim.start("open('/tmp/never', 'w')", place="n1/0")
    shim.until(lambda: shim.told)
    assert isinstance(shim.told[0], NodeLoss)
    assert "it is meant for node 'n1', and this is 'n0'" in (fleet.folder / "n0.log").read_text()
    shim.close()


def test_folders_are_compared(fleet, tmp_path, monkeypatch):
    shared = SharedFolders(SECRET)
    below = tmp_path / "not" / "there" / "yet"
    assert shared.refuses([str(tmp_path), str(below)], fleet.hosts()) == ""
    assert list(tmp_path.iterdir()) == []
    written = contextlib.nullcontext(str(tmp_path / "absent"))
    monkeypatch.setattr("pollux.backends.fleet.shared_folders._marker", lambda folder: written)
    why = SharedFolders(SECRET).refuses(["/here/only"], fleet.hosts())
    assert "'/here/only' is not the same on node 'n0'" in why


def test_a_host_without_a_secret_says_so(tmp_path, monkeypatch):
    monkeypatch.delenv("POLLUX_FLEET_SECRET", raising=False)
    words = ["--node", "x", "--places", "1", "--announce", str(tmp_path / "x.json")]
    with pytest.raises(InvalidInput, match="POLLUX_FLEET_SECRET"):
        main(words)
    with pytest.raises(InvalidInput, match="cannot read the secret"):
        main([*words, "--secret-file", str(tmp_path / "absent")])
