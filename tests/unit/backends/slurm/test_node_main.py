"""What a pilot's step finds out on its node, and what it does with the host."""

import io
import json
import signal
import subprocess

import pytest

from pollux.backends.process.devices import Devices
from pollux.backends.slurm import node_main
from pollux.backends.slurm.node_main import Where, _keep, _Node, _where, address_towards, facts_of, without_slurm
from pollux.backends.slurm.pool_folder import PoolFolder
from pollux.backends.transport.query import ask_host
from pollux.core import Node
from pollux.core.errors import BackendFailed
from pollux.testing.waiting import PATIENCE_SECONDS, wait_until
from pollux.wire.live.node_messages import SeeRequest


@pytest.fixture
def driver(monkeypatch):
    def shows(*gpus):
        node = Node("here", len(gpus) or 2, "A100" if gpus else "cpu")
        monkeypatch.setattr(node_main, "find_devices", lambda slots, environ: Devices(node, gpus, (0, 1)))

    shows()
    return shows


def test_slots_need_no_gpu(driver):
    facts = facts_of({"SLURM_CPUS_ON_NODE": "8", "SLURM_MEM_PER_NODE": "2048"}, 4, 3)
    assert (facts["places"], facts["gpus"], facts["gpu_type"]) == (3, [], "cpu")
    assert (facts["cpus"], facts["memory_bytes"]) == (8.0, 2048.0 * 2**20)


def test_gpus_are_those_that_slurm_gave(driver):
    driver(0, 1, 2, 3)
    facts = facts_of({"CUDA_VISIBLE_DEVICES": "2,3"}, 2, 0)
    assert (facts["places"], facts["gpus"], facts["gpu_type"]) == (2, [2, 3], "A100")


@pytest.mark.parametrize(
    ("given", "gpus", "words"),
    [
        ("0", 2, "2 GPUs were asked for"),
        ("", 1, "1 GPUs were asked for"),
        ("MIG-1,MIG-2", 2, "by names"),
        ("6,7", 2, "shows"),
    ],
)
def test_a_node_that_lies_is_found_out(driver, given, gpus, words):
    driver(0, 1)
    with pytest.raises(BackendFailed, match=words):
        facts_of({"CUDA_VISIBLE_DEVICES": given}, gpus, 0)


def test_the_address_on_the_way_to_the_service(monkeypatch):
    assert address_towards("127.0.0.1") == "127.0.0.1"

    def refuse(*_):
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(node_main.socket, "socket", refuse)
    with pytest.raises(BackendFailed, match="'head-1' has no address"):
        address_towards("head-1")


@pytest.mark.parametrize(
    ("ports", "listen", "reached"),
    [
        ("", "127.0.0.1", ""),
        ("node2=10.0.0.2:20002", "127.0.0.1", ""),
        ("node1=127.0.0.1:20001,node2=10.0.0.2:20002", "127.0.0.1:20001", "127.0.0.1"),
        ("node1=10.7.0.1:20001", "0.0.0.0:20001", "10.7.0.1"),
        ("node1:20001", "0.0.0.0:20001", "node1"),
    ],
)
def test_a_host_can_be_reached_at_the_address_that_slurm_has(ports, listen, reached):
    """A node may have several, and the way to the service need not lead over that one."""
    where = _where("127.0.0.1", ports, "node1")
    assert (where.listen, where.meet, where.reached) == (listen, "127.0.0.1", reached)


def test_replicas_meet_on_the_way_to_the_service_wherever_the_host_listens(tmp_path, monkeypatch):
    (tmp_path / "pilots").mkdir()
    started: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(node_main.subprocess, "Popen", lambda words, stdin, env: started.append((words, env)))
    monkeypatch.setattr(node_main, "meeting_variables", lambda address, environ: {"MEET": address})
    facts = {"places": 2, "gpus": [0, 1], "gpu_type": "A100", "cpus": 8.0, "memory_bytes": 0.0}
    _Node(tmp_path, "1_0", "node1").start(facts, Where("0.0.0.0:20001", "10.0.0.1", "10.7.0.1"), False)
    ((words, environ),) = started
    assert words[words.index("--listen") + 1] == "0.0.0.0:20001"
    assert environ["MEET"] == "10.0.0.1"
    assert words[words.index("--secret-file") + 1] == str(tmp_path / "secret")
    assert json.loads((tmp_path / "pilots" / "1_0.node1.facts").read_text())["address"] == "10.7.0.1"


def test_a_host_that_listens_everywhere_turns_away_who_does_not_know_the_secret(tmp_path):
    (tmp_path / "pilots").mkdir()
    (tmp_path / "secret").write_text("ab" * 32)
    facts = {"places": 1, "gpus": [], "gpu_type": "cpu", "cpus": 1.0, "memory_bytes": 0.0}
    host = _Node(tmp_path, "1_0", "node1").start(facts, Where("0.0.0.0:0", "127.0.0.1", "127.0.0.2"), False)
    try:
        announced = tmp_path / "pilots" / "1_0.node1.json"
        wait_until("host", announced.exists)
        notes, _ = PoolFolder(tmp_path).notes()
        ((address, port),) = [note.address for note in notes.values()]
        assert address == "127.0.0.2"
        for reached in ("127.0.0.1", address):
            assert ask_host((reached, port), b"\xab" * 32, SeeRequest()).seen == ()
            with pytest.raises(BackendFailed):
                ask_host((reached, port), b"\xac" * 32, SeeRequest())
    finally:
        host.stdin.close()
        host.wait(PATIENCE_SECONDS)


def test_a_node_that_two_pilots_share_has_two_names(tmp_path):
    assert _Node(tmp_path, "1_0", "node1").claim_name() == "node1"
    assert _Node(tmp_path, "1_0", "node1").claim_name() == "node1"
    assert _Node(tmp_path, "1_1", "node1").claim_name() == "node1.1-1"
    _Node(tmp_path, "1_1", "node1").free_name()
    assert _Node(tmp_path, "1_2", "node1").claim_name() == "node1.1-2"
    _Node(tmp_path, "1_0", "node1").free_name()
    assert _Node(tmp_path, "1_2", "node1").claim_name() == "node1"


class PlayedHost:
    """A host that runs until it is told to end."""

    pid = -1

    def __init__(self):
        self.stdin = io.BytesIO()
        self.killed = False

    def wait(self, timeout=None):
        if self.stdin.closed:
            return 0
        raise subprocess.TimeoutExpired("host", timeout)

    def kill(self):
        self.killed = True


@pytest.mark.parametrize(("pulse", "seconds"), [("here 1 1", 900.0), ("closed 1 2", 60.0)])
def test_a_node_without_work_or_service_is_given_back(tmp_path, monkeypatch, pulse, seconds):
    now = [0.0]

    def clock():
        now[0] += 5.0
        return now[0]

    monkeypatch.setattr(node_main.time, "monotonic", clock)
    monkeypatch.setattr(node_main, "has_replicas", lambda pid: now[0] < 300.0)
    (tmp_path / "pulse").write_text(pulse)
    host = PlayedHost()
    assert _keep(_Node(tmp_path, "1_0", "node1"), host, 900.0) == 0
    assert host.stdin.closed
    assert 300.0 + seconds < now[0] < 300.0 + seconds + 60.0


def test_a_node_that_is_taken_back_waits_for_its_work_only(tmp_path, monkeypatch):
    (tmp_path / "pilots").mkdir()
    node, host = _Node(tmp_path, "1_0", "node1"), PlayedHost()
    looks = iter([True, True, True, False])
    monkeypatch.setattr(node_main, "has_replicas", lambda pid: next(looks))
    node.note_leaving(signal.SIGTERM, None)
    assert _keep(node, host, 900.0) == 0
    assert host.stdin.closed
    assert next(looks, "asked until there was none") == "asked until there was none"


def test_a_time_limit_that_is_near_does_not_end_a_node(tmp_path):
    (tmp_path / "pilots").mkdir()
    node = _Node(tmp_path, "1_0", "node1")
    node.note_leaving(signal.SIGUSR1, None)
    assert not node.is_taken_back


def test_a_notice_is_noted_for_the_service(tmp_path):
    (tmp_path / "pilots").mkdir()
    node = _Node(tmp_path, "1_0", "node1")
    node.note_leaving(signal.SIGTERM, None)
    assert (tmp_path / "pilots" / "1_0.node1.leaving").read_text() == "SIGTERM"
    node.note("facts", json.dumps({"a": 1}))
    assert (tmp_path / "pilots" / "1_0.node1.facts").read_text() == '{"a": 1}'


def test_replicas_do_not_see_the_step_they_run_in():
    given = {"SLURM_NTASKS": "3", "SLURM_PROCID": "0", "PMI_RANK": "0", "SLURM_JOB_ID": "7", "PATH": "/bin"}
    assert without_slurm(given) == {"SLURM_JOB_ID": "7", "PATH": "/bin"}
