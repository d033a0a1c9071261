"""Whether nodes see the folders of a job: asked at submission, and again where a job comes to a node not asked yet."""

import threading
import time
from pathlib import Path

import pytest

from pollux.backends.fleet import node_watch, shared_folders
from pollux.backends.fleet.backend import FleetBackend
from pollux.backends.fleet.shared_folders import FolderCheck, SharedFolders
from pollux.backends.nodes.provider import LentNode, PooledNodeProvider
from pollux.backends.nodes.slot import read_slots
from pollux.backends.protocol import Launch, NodeDown, ReplicasEnded
from pollux.core import Node, Placement
from pollux.core.errors import BackendFailed
from pollux.testing.waiting import PATIENCE_SECONDS
from pollux.wire.live.node_messages import SeenMessage


def slots(*names):
    return read_slots(names)


def host(number):
    return LentNode(Node(f"n{number}", 2, "cpu", num_cpus=4.0), ("10.0.0.1", number))


class Hosts:
    """What hosts answer, by their ports: `blind` ones see nothing of this machine, `silent` ones say nothing."""

    def __init__(self):
        self.blind, self.silent, self.asked = set(), set(), []

    def answer(self, address, secret, request, timeout_seconds=5.0):
        port = address[1]
        self.asked.append((port, *request.paths))
        if port in self.silent:
            raise BackendFailed("the host does not answer")
        return SeenMessage(tuple(port not in self.blind and Path(path).exists() for path in request.paths))


@pytest.fixture
def hosts(monkeypatch):
    made = Hosts()
    monkeypatch.setattr(shared_folders, "ask_host", made.answer)
    monkeypatch.setattr("pollux.backends.fleet.node_watch.ask_host", made.answer)
    monkeypatch.setattr(shared_folders, "_PAUSE_SECONDS", 0.001)
    return made


@pytest.fixture
def shared():
    return SharedFolders(b"x" * 32)


def found(shared, folders, nodes):
    """The verdict, however long it takes."""
    done = threading.Event()
    said = shared.check(folders, nodes, done.set)
    if said is None:
        assert done.wait(PATIENCE_SECONDS)
        said = shared.check(folders, nodes, lambda: None)
    return said


def test_a_node_is_asked_once(shared, hosts, tmp_path):
    assert found(shared, [str(tmp_path)], [host(1)]) == FolderCheck()
    assert found(shared, [str(tmp_path)], [host(1)]) == FolderCheck()
    assert len(hosts.asked) == 1
    assert list(tmp_path.iterdir()) == []
    assert found(shared, [str(tmp_path)], [host(1), host(2)]) == FolderCheck()
    assert [port for port, *_ in hosts.asked] == [1, 2]


def test_a_node_that_came_later_is_compared_too(shared, hosts, tmp_path):
    hosts.blind.add(2)
    assert shared.refuses([str(tmp_path)], [host(1)]) == ""
    said = found(shared, [str(tmp_path)], [host(1), host(2)])
    assert f"'{tmp_path}' is not the same on node 'n2'" in said.why
    assert said.elsewhere
    assert not found(SharedFolders(b"x" * 32), [str(tmp_path)], [host(2)]).elsewhere
    # Put right, it may be used.
    hosts.blind.clear()
    assert found(shared, [str(tmp_path)], [host(2)]) == FolderCheck()


def test_silence_is_no_yes(shared, hosts, tmp_path):
    hosts.silent.add(3)
    assert shared.refuses([str(tmp_path)], [host(3)]) == ""
    said = found(shared, [str(tmp_path)], [host(3)])
    assert said.silent == "n3"
    assert "'n3' does not say" in said.why
    hosts.silent.clear()
    assert found(shared, [str(tmp_path)], [host(3)]) == FolderCheck()


def test_a_folder_that_nobody_can_write_to_is_not_taken_for_shared(shared, hosts, tmp_path, monkeypatch):
    """The nearest folder there is, such as `/`, is on every machine, and another on each."""
    closed = tmp_path / "closed"
    closed.mkdir()
    real = shared_folders.os.open
    monkeypatch.setattr(
        shared_folders.os,
        "open",
        lambda path, *more: real(tmp_path / "no" / "way" if closed in path.parents else path, *more),
    )
    for folder in (closed / "checkpoints", closed):
        why = shared.refuses([str(tmp_path), str(folder)], [host(1)])
        assert f"'{folder}' cannot be written to here" in why
        assert "checkpoint: dir" in why
    # A job's own folder need not be written to: that it is there will do.
    assert shared.refuses([str(closed)], [host(1)]) == ""
    assert hosts.asked[-1] == (1, str(closed))


@pytest.fixture
def backend(tmp_path, hosts):
    lender = PooledNodeProvider()
    made = FleetBackend(tmp_path / "home", lender, "test", head="127.0.0.1", warm=False)
    made.lender, made.told = lender, []
    made.start(made.told.append)
    yield made
    made.close()


def end_of(backend, folder, checkpoints=None, **counts):
    env = {} if checkpoints is None else {"POLLUX_CHECKPOINT_DIR": str(checkpoints)}
    backend.submit(Launch("job", 1, Placement.of(counts), ("python", "x.py"), str(folder), env))
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (ends := [event for event in backend.told if isinstance(event, ReplicasEnded)]):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return ends[0]


def test_a_job_that_was_taken_before_there_were_nodes_is_refused_when_it_is_placed(backend, hosts, tmp_path):
    assert backend.refuses([str(tmp_path), str(tmp_path / "checkpoints")]) == ""
    hosts.blind.add(1)
    backend.lender.offer([host(1)])
    end = end_of(backend, tmp_path, n1=1)
    assert end.outcome == "crashed"
    assert f"folder '{tmp_path}' is not the same on node 'n1'" in end.detail
    assert backend.lender.held("job") == {}


def test_checkpoints_are_looked_for_as_well(backend, hosts, tmp_path, monkeypatch):
    monkeypatch.setattr(shared_folders, "_nearest", lambda folder: folder)
    backend.lender.offer([host(1)])
    end = end_of(backend, tmp_path, tmp_path / "only" / "here", n1=1)
    assert f"folder '{tmp_path / 'only' / 'here'}' cannot be written to here" in end.detail


def test_one_node_without_the_folder_is_no_fault_of_the_job(backend, hosts, tmp_path):
    hosts.blind.add(2)
    backend.lender.offer([host(1), host(2)])
    assert "n2" in backend.refuses([str(tmp_path)])
    end = end_of(backend, tmp_path, n2=1)
    assert (end.outcome, "'n2'" in end.detail) == ("refused", True)


def test_nothing_is_started_on_a_node_that_does_not_say(backend, hosts, tmp_path):
    hosts.silent.add(1)
    backend.lender.offer([host(1)])
    end = end_of(backend, tmp_path, n1=1)
    assert end.outcome == "refused"
    assert "'n1' does not say whether it shares" in end.detail
    assert any("not used until it answers" in text for text in backend.warnings())
    deadline = time.monotonic() + PATIENCE_SECONDS
    while NodeDown not in map(type, backend.told):
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_node_that_does_not_answer_for_long_is_given_up_until_it_answers(backend, hosts, tmp_path, monkeypatch):
    given_up: list[list[str]] = []
    monkeypatch.setattr(node_watch, "_PROBE_SECONDS", 0.01)
    monkeypatch.setattr(
        backend.lender, "release_silent", lambda silent: given_up.append([hosted.node.id for hosted in silent])
    )
    hosts.silent.add(1)
    backend.lender.offer([host(1), host(2)])
    assert end_of(backend, tmp_path, n1=1).outcome == "refused"
    until(lambda: len(given_up) > 3)
    assert not any(given_up), "it may answer yet"
    monkeypatch.setattr(node_watch, "_GIVE_UP_TIMES", 0.0)
    until(lambda: ["n1"] in given_up)
    hosts.silent.clear()
    until(lambda: given_up[-1] == [])
    assert {tuple(each) for each in given_up} == {(), ("n1",)}


def until(is_so):
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_who_would_join_there_does_not(backend, hosts, tmp_path):
    hosts.blind.add(2)
    backend.lender.offer([host(1), host(2)])
    backend.refuses([str(tmp_path)])
    work = backend._dispatcher.changes
    launch = Launch("job", 2, Placement.of({"n1": 1, "n2": 1}), ("python", "x.py"), str(tmp_path))
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (said := work.vet(launch, slots("n1/0", "n2/0"), slots("n1/0"))) is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    why, left = said
    assert "'n2'" in why
    assert left == slots("n1/0", "gone:n2/0")
    assert work.vet(launch, slots("n1/0", "n1/1"), slots("n1/0")) == ("", slots("n1/0", "n1/1"))


class Hanging:
    """A folder whose file system does not answer until `goes_on`; notes which threads looked at it."""

    def __init__(self, monkeypatch, folder):
        self.folder, self.goes_on = str(folder), threading.Event()
        self.threads: list[str] = []
        real = Path.is_dir

        def is_dir(path):
            if str(path).startswith(self.folder):
                self.threads.append(threading.current_thread().name)
                assert self.goes_on.wait(PATIENCE_SECONDS)
            return real(path)

        monkeypatch.setattr(Path, "is_dir", is_dir)


@pytest.fixture
def hanging(monkeypatch, tmp_path):
    (tmp_path / "hung").mkdir()
    made = Hanging(monkeypatch, tmp_path / "hung")
    yield made
    made.goes_on.set()


def test_a_folder_that_hangs_holds_up_no_other_job(backend, hosts, hanging, tmp_path):
    backend.lender.offer([host(1), host(2)])
    for number in range(30):
        name = f"hung-{number}"
        backend.submit(Launch(name, 1, Placement.of({"n1": 1}), ("python", "x.py"), hanging.folder))
    until(lambda: hanging.threads)
    hosts.blind.add(2)
    assert "is not the same on node 'n2'" in end_of(backend, tmp_path, n2=1).detail
    for number in range(30):
        backend.stop(f"hung-{number}", 1, 0.0)
    until(lambda: len([event for event in backend.told if isinstance(event, ReplicasEnded)]) == 31)
    assert backend.healthy
    assert hanging.threads == ["pollux-shared-folders"], "one thread for one folder, however many jobs name it"


def test_what_has_hung_for_long_is_told_and_asked_again_once_it_answers(shared, hosts, hanging, monkeypatch):
    assert shared.check([hanging.folder], [host(1)], lambda: None) is None
    monkeypatch.setattr(shared_folders, "_HUNG_SECONDS", -1.0)
    for number in (1, 2):
        said = shared.check([hanging.folder], [host(number)], lambda: None)
        assert f"the file system of '{hanging.folder}' has not answered" in said.why
        assert (said.elsewhere, said.silent) == (False, "")
    hanging.goes_on.set()
    until(lambda: shared.check([hanging.folder], [host(1)], lambda: None) == FolderCheck())


def test_however_many_folders_hang_the_threads_are_few(shared, hosts, hanging, monkeypatch):
    def looking():
        return [each for each in threading.enumerate() if each.name == "pollux-shared-folders"]

    until(lambda: not looking())
    for number in range(100):
        assert shared.check([f"{hanging.folder}/{number}"], [host(1)], lambda: None) is None
    assert len(looking()) == 16
    monkeypatch.setattr(shared_folders, "_HUNG_SECONDS", -1.0)
    assert "has not answered" in shared.check([f"{hanging.folder}/200"], [host(1)], lambda: None).why
    assert len(looking()) == 16
    hanging.goes_on.set()
    until(lambda: not looking())
    assert found(shared, [f"{hanging.folder}/200"], [host(1)]) == FolderCheck()
