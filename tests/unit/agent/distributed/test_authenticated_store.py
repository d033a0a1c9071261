import datetime
import os
import random
import socket
import threading
import time

import pytest
import torch.distributed as dist

from pollux.agent.distributed import rendezvous
from pollux.agent.distributed.authenticated_store import AuthenticatedStore
from pollux.testing.waiting import PATIENCE_SECONDS, wait_until
from pollux.wire.live import store_channel
from pollux.wire.live.store_channel import SECRET_VARIABLE, StoreAccess, StoreOperation, pack

MOMENT = datetime.timedelta(milliseconds=20)


@pytest.fixture
def store(hosted_store):
    made = AuthenticatedStore(hosted_store.access, PATIENCE_SECONDS)
    yield made
    made.close()


@pytest.fixture(params=["python", "c++"])
def asked(request, store):
    """The store as scripts call it, and as PyTorch's own code does."""
    return store if request.param == "python" else dist.PrefixStore("of", dist.PrefixStore("mine", store))


def test_it_is_a_store(asked):
    asked.set("text", "1")
    asked.set("bytes", b"\0\xff")
    assert (asked.get("text"), asked.get("bytes")) == (b"1", b"\0\xff")
    assert (asked.add("n", 5), asked.add("n", -7), asked.get("n")) == (5, -2, b"-2")
    assert (asked.check(["text", "n"]), asked.check(["text", "none"])) == (True, False)
    assert (asked.compare_set("c", "", "a"), asked.compare_set("c", "b", "d")) == (b"a", b"a")
    asked.append("text", "2")
    asked.multi_set(["x", "y"], ["3", "4"])
    assert asked.multi_get(["text", "x", "y"]) == [b"12", b"3", b"4"]
    assert asked.num_keys() == 6
    assert (asked.delete_key("x"), asked.delete_key("x")) == (True, False)
    asked.wait(["y"])
    assert asked.has_extended_api()


def test_keys_that_do_not_come_in_time_are_told(asked):
    with pytest.raises(dist.DistStoreError, match="was not written"):
        asked.wait(["none"], MOMENT)
    asked.set_timeout(MOMENT)
    with pytest.raises(dist.DistStoreError, match="none"):
        asked.get("none")
    asked.set("none", "here")
    assert asked.get("none") == b"here"


def test_who_waits_holds_up_no_other(asked):
    got = []
    waiting = [threading.Thread(target=lambda: got.append(asked.get("late"))) for _ in range(4)]
    for thread in waiting:
        thread.start()
    for number in range(50):
        assert asked.add("n", 1) == number + 1
    assert got == []
    asked.set("late", "here")
    for thread in waiting:
        thread.join(PATIENCE_SECONDS)
    assert got == [b"here"] * 4


def test_a_first_request_may_be_large_and_come_with_the_proof(hosted_store, store):
    for size in (5_000, 5_000_000):
        with socket.create_connection((hosted_store.access.host, hosted_store.access.port)) as line:
            asked = store_channel.nonce()
            line.sendall(store_channel.GREETING + asked)
            answered = line.recv(64, socket.MSG_WAITALL)[:32]
            secret = hosted_store.access.secret
            reader, writer = store_channel.frames(secret, b"replica", asked, answered)
            request = writer.frame(pack(StoreOperation.SET, [b"large", bytes(size)]))
            line.sendall(store_channel.proof(secret, b"replica", asked, answered) + request)
            bodies: list[bytes] = []
            while not bodies:
                bodies = reader.feed(line.recv(1000))
        assert store_channel.unpack(bodies[0]) == (StoreOperation.DONE, [])
        assert store.get("large") == bytes(size)


def test_whoever_waits_for_ever_holds_up_no_other(store):
    waits = threading.Thread(target=lambda: store.wait(["late"], datetime.timedelta(days=100_000)))
    waits.start()
    assert store.add("n", 1) == 1
    store.set("late", "x")
    waits.join(PATIENCE_SECONDS)
    assert not waits.is_alive()


def test_a_refused_request_is_told_and_the_next_one_answered(store):
    store.set("n", "x")
    with pytest.raises(dist.DistStoreError, match="no number"):
        store.add("n", 1)
    with pytest.raises(dist.DistStoreError, match="a key of 5000 bytes"):
        store.set("k" * 5000, "x")
    assert store.get("n") == b"x"


def test_a_signal_in_the_middle_leaves_no_answer_to_the_next_request(store, monkeypatch):
    store.set("one", "1")
    connection = store._free[-1]

    def interrupted(*values):
        raise KeyboardInterrupt

    monkeypatch.setattr(connection._reader, "feed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.get("one")
    store.set("two", "2")
    assert store.get("two") == b"2"


def test_a_forked_worker_speaks_for_itself(store):
    store.set("a", "1")
    pid = os.fork()
    if pid == 0:
        os._exit(0 if store.get("a") == b"1" else 1)
    for _ in range(20):
        assert store.get("a") == b"1"
    assert os.waitpid(pid, 0)[1] == 0


def test_a_store_that_is_gone_is_told_at_once(hosted_store, store):
    hosted_store.close()
    began = time.monotonic()
    for _ in range(2):
        with pytest.raises(dist.DistNetworkError, match=hosted_store.access.address):
            store.get("a")
    assert time.monotonic() - began < PATIENCE_SECONDS / 2


def test_a_replica_that_says_nonsense_is_left_and_the_others_are_not(hosted_store, store):
    """Two thousand messages with the right codes and a random meaning; whoever breaks the protocol comes anew."""
    chance = random.Random(3)
    for number in range(2000):
        operation = chance.choice([*StoreOperation, *range(20)])
        parts = [chance.choice([b"", b"n", b"9" * 30, b"-1", b"5", b"[" * 5000]) for _ in range(chance.randrange(4))]
        body = bytearray(pack(StoreOperation.SET, parts))
        body[0] = operation
        if chance.random() < 0.2:
            body[chance.randrange(len(body))] = chance.randrange(256)
        made = store._connect()
        made._line.sendall(made._writer.frame(bytes(body)))
        made.close()
        if number % 200 == 0:
            assert store.add("counted", 1) == number // 200 + 1
    assert store.add("counted", 0) == 10


def test_another_secret_opens_nothing(hosted_store, store, tmp_path):
    wrong = StoreAccess(hosted_store.access.host, hosted_store.access.port, bytes(32))
    with pytest.raises(dist.DistNetworkError, match="does not know the job's secret"):
        AuthenticatedStore(wrong, 5.0)


@pytest.fixture
def inside(hosted_store, monkeypatch):
    """As in a replica, whose script makes its group itself."""
    address = {"MASTER_ADDR": hosted_store.access.host, "MASTER_PORT": str(hosted_store.access.port)}
    for name, value in {**address, "RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(SECRET_VARIABLE, hosted_store.access.encode())
    rendezvous.install()
    rendezvous.install()


@pytest.mark.parametrize("url", ["env://", "env://?rank=3&world_size=8"])
def test_groups_of_scripts_meet_in_the_jobs_store(inside, url):
    store, rank, size = next(dist.rendezvous(url))
    assert isinstance(store, AuthenticatedStore)
    assert (rank, size) == ((3, 8) if "?" in url else (0, 1))
    store.close()


def test_a_store_of_the_scripts_own_is_none_of_ours(inside, monkeypatch):
    """As under a torchrun that the job's command starts."""
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_PORT", str(host.port))
    store, *_ = next(dist.rendezvous("env://", timeout=datetime.timedelta(seconds=PATIENCE_SECONDS)))
    assert isinstance(store, dist.TCPStore)


def test_pytorchs_own_client_of_the_same_user_is_answered(hosted_store, store):
    limit = datetime.timedelta(seconds=PATIENCE_SECONDS)
    access = hosted_store.access
    plain = dist.TCPStore(access.host, access.port, 1, is_master=False, timeout=limit)
    plain.set("a", "1")
    assert (plain.get("a"), plain.add("n", 2), plain.check(["a", "b"])) == (b"1", 2, False)
    assert store.get("a") == b"1", "both see the same keys"
    with pytest.raises(dist.DistStoreError):
        plain.wait(["late"], MOMENT)
    store.set("late", "x")
    assert plain.multi_get(["a", "late"]) == [b"1", b"x"]
    assert plain.delete_key("a")
    wait_until("the key is gone", lambda: not store.check(["a"]) or None, PATIENCE_SECONDS, 0.01)
