"""Checkpoints in a real S3 server: found by other machines, whole or not at all, in the hands of one job."""

import json
import threading
import time
from dataclasses import replace

import pytest
import torch
from tests.unit.agent.saved_steps import newest, put, state

from pollux.agent.checkpoint.checkpointer import Checkpointer
from pollux.agent.checkpoint.handover import FolderHold
from pollux.agent.checkpoint.lease import LEASE_NAME, Holder, Lease
from pollux.agent.checkpoint.manifest import MANIFEST_NAME
from pollux.agent.checkpoint.object_store import ObjectStoreFolder, fetch
from pollux.agent.checkpoint.reader import load
from pollux.agent.checkpoint.state import State
from pollux.core.errors import CheckpointDamaged, InvalidInput, MisusedJob, Unreachable
from pollux.storage.object_store import ObjectStore
from pollux.testing.waiting import PATIENCE_SECONDS, wait_until

FIRST, SECOND = (f"step-{step:010d}" for step in (1, 2))


@pytest.fixture
def writer(store):
    checkpointer = Checkpointer(store())
    yield checkpointer
    checkpointer.close()


def there(store):
    """Names of checkpoints in the store, without what makes attempts differ, and of what else is there."""
    names = set(store("looker").sizes())
    whole = {name.split("/")[0] for name in names if name.endswith(MANIFEST_NAME)}
    rest = {name for name in names if name.split("/")[0] not in whole} - {LEASE_NAME}
    return {name.split("~")[0] for name in whole}, rest


def key_of(store, step):
    """The name under which the files of a step are."""
    (key,) = {name.split("/")[0] for name in store().sizes() if name.startswith(f"{step}~")}
    return key


def flip(store, name, position=100):
    content = bytearray(store().read(name))
    content[position] ^= 1
    store().write(name, bytes(content))


def data_file(store, step):
    return next(name for name in store().sizes() if name.startswith(f"{step}~") and name.endswith(".distcp"))


def test_what_was_saved_is_loaded_on_another_machine(writer, store):
    put(writer, 3)
    assert writer.last_error is None
    writer.close()
    other = Checkpointer(store("b"))
    saved = newest(other)
    assert saved.path == store("b").cache / "step-0000000003"
    assert saved.manifest.values == {"step": 3}
    loaded = load(saved)
    assert loaded.objects == {"user": {"step": 3}}
    assert all(torch.equal(loaded.tensors[name], tensor) for name, tensor in state(3).items())
    other.close()


def test_nothing_there_is_none(writer):
    assert writer.latest() is None


def test_as_many_are_kept_as_were_asked_for(writer, store):
    put(writer, *range(1, 6))
    assert there(store) == ({"step-0000000004", "step-0000000005"}, set())
    copies = {path.name for path in store().cache.iterdir() if path.name.startswith("step-")}
    assert copies == {"step-0000000004", "step-0000000005"}
    assert not list(store().cache.glob(".tmp-*"))


def test_a_step_is_saved_again(writer, store):
    put(writer, 1, 1)
    assert newest(writer).path.name == f"{FIRST}-1"
    assert there(store) == ({f"{FIRST}-1"}, set())


def test_later_ones_go_after_a_roll_back(writer, store):
    put(writer, 1, 2)
    writer.drop_after(1)
    assert there(store) == ({FIRST}, set())
    put(writer, 2)
    writer.close()
    other = Checkpointer(store("b"))
    assert newest(other).manifest.values == {"step": 2}
    other.close()


def test_an_old_copy_of_the_same_name_is_not_taken_for_the_new_one(writer, store):
    """As on a machine that the job left before it went back and another way."""
    put(writer, 1, 2)
    writer.close()
    second = Checkpointer(store("b"))
    second.drop_after(1)
    second.save(2, State({"model.weight": torch.full((4, 3), 7.0)}, {}, {}), {}, wait=True)
    assert second.last_error is None
    assert newest(second).path.name == SECOND
    second.close()
    third = Checkpointer(store())
    assert float(load(newest(third)).tensors["model.weight"][0, 0]) == 7.0
    third.close()


@pytest.mark.parametrize("what", ["its manifest", "a file", "a file that is gone"])
def test_a_damaged_one_is_passed_over(writer, store, what):
    put(writer, 1, 2)
    writer.close()
    if what == "its manifest":
        flip(store, f"{key_of(store, SECOND)}/{MANIFEST_NAME}")
    elif what == "a file":
        flip(store, data_file(store, SECOND))
    else:
        store().remove([data_file(store, SECOND)])
    other = Checkpointer(store("b"))
    with pytest.warns(UserWarning, match="skipped a damaged checkpoint: s3://"):
        assert newest(other).manifest.values == {"step": 1}
    put(other, 3)
    assert there(store)[0] == {FIRST, "step-0000000003"}
    other.close()


def test_none_that_is_whole_is_an_error(writer, store):
    put(writer, 1)
    writer.close()
    flip(store, data_file(store, FIRST))
    other = Checkpointer(store("b"))
    with (
        pytest.warns(UserWarning, match="skipped"),
        pytest.raises(CheckpointDamaged, match="none of the 1 checkpoints"),
    ):
        other.latest()
    other.close()


def test_a_half_that_a_dead_writer_left_is_never_found_and_goes(writer, store):
    put(writer, 1)
    writer.close()
    store().write(f"{SECOND}~000000-00000000/__0_0.distcp", b"half")
    store().write("notes.txt", b"somebody else's")
    other = Checkpointer(store("b"))
    assert newest(other).manifest.values == {"step": 1}
    assert there(store) == ({FIRST}, {"notes.txt"})
    other.close()


def test_one_that_fails_midway_leaves_nothing_and_the_older_one(writer, store, monkeypatch):
    put(writer, 1)
    monkeypatch.setattr(ObjectStoreFolder, "publish", lambda *arguments: 1 / 0)
    put(writer, 2)
    assert isinstance(writer.last_error, ZeroDivisionError)
    assert there(store) == ({FIRST}, set())
    monkeypatch.undo()
    put(writer, 3)
    assert writer.last_error is None


def test_what_was_published_stays_where_only_the_clearing_fails(writer, store, monkeypatch):
    put(writer, 1)
    monkeypatch.setattr(ObjectStoreFolder, "retain", lambda *arguments: 1 / 0)
    put(writer, 2)
    assert there(store) == ({FIRST, SECOND}, set())
    assert newest(writer).manifest.values == {"step": 2}


def test_many_of_one_machine_fetch_one_copy(writer, store):
    put(writer, 1)
    key = key_of(store, FIRST)
    content = store().read(f"{key}/{MANIFEST_NAME}")
    machine, downloads = store("b"), []
    real = machine.download

    def download(name, path):
        downloads.append(name)
        real(name, path)

    machine.download = download
    threads = [threading.Thread(target=fetch, args=(machine, FIRST, key, content, "launch")) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert len(downloads) == len(set(downloads)) > 0


def test_a_job_that_lives_keeps_others_out(store):
    one = ObjectStoreFolder(store(), Holder(), beat_seconds=0.1)
    with pytest.raises(
        MisusedJob, match=r"in use by process \d+ on .*; end that job, or give this one another address"
    ):
        ObjectStoreFolder(store("b"), Holder(), beat_seconds=30.0)
    one.release()
    ObjectStoreFolder(store("b"), Holder(), beat_seconds=60.0).release()


def test_one_that_is_dead_is_waited_for_and_then_taken_over(store):
    dead = Lease(store(), Holder(), beat_seconds=3600.0)
    began = time.monotonic()
    ObjectStoreFolder(store("b"), Holder(), beat_seconds=0.2).release()
    assert time.monotonic() - began >= 0.6
    dead._ends.set()


def test_one_that_died_on_this_machine_is_taken_over_at_once(store):
    one = ObjectStoreFolder(store(), Holder(), beat_seconds=3600.0)
    one._unlock()
    began = time.monotonic()
    ObjectStoreFolder(store(), Holder(), beat_seconds=3600.0).release()
    assert time.monotonic() - began < 60
    one._lease._ends.set()


def test_a_later_start_of_the_same_job_takes_over_and_shuts_the_earlier_out(store):
    earlier = Checkpointer(store(), holder=Holder("run", "a:1", 1))
    put(earlier, 1)
    later = Checkpointer(store("b"), holder=Holder("run", "a:2", 2))
    put(later, 2)
    put(earlier, 3)
    assert isinstance(earlier.last_error, MisusedJob)
    assert "was taken over by process" in str(earlier.last_error)
    assert there(store) == ({FIRST, SECOND}, set())
    earlier.close()
    with pytest.raises(MisusedJob, match="a later start of this job"):
        Checkpointer(store("c"), holder=Holder("run", "a:1", 1))
    put(later, 4)
    assert later.last_error is None
    later.close()
    # Somebody else need not wait for it: with such a beat that would be minutes.
    Lease(store("d"), Holder(), beat_seconds=600.0).release()


def test_an_earlier_start_publishes_nothing_even_when_the_later_one_has_ended(store):
    earlier = Checkpointer(store(), keep=1, holder=Holder("run", "a:1", 1))
    put(earlier, 1)
    later = Checkpointer(store("b"), keep=1, holder=Holder("run", "a:2", 2))
    put(later, 2)
    later.close()
    put(earlier, 3)
    assert isinstance(earlier.last_error, MisusedJob)
    earlier.drop_after(0)
    assert there(store) == ({SECOND}, set())
    earlier.close()


def test_what_an_earlier_start_writes_late_does_not_shut_the_later_one_out(store):
    """A beat that was on its way when the later one took over, and lands after that."""
    earlier = Checkpointer(store(), holder=Holder("run", "a:1", 1))
    put(earlier, 1)
    late = store().read(LEASE_NAME)
    later = Checkpointer(store("b"), holder=Holder("run", "a:2", 2))
    store().write(LEASE_NAME, late)
    put(later, 2)
    assert later.last_error is None
    put(earlier, 3)
    assert isinstance(earlier.last_error, MisusedJob)
    assert there(store) == ({FIRST, SECOND}, set())
    earlier.close()
    later.close()


def test_a_release_that_comes_after_the_hand_over_does_not_let_others_in(store):
    """The replica that leaves gives back what the next one has just taken: that one takes it again."""
    leaver = Lease(store(), Holder("run", "a:1", 1), beat_seconds=3600.0)
    stays = Lease(store("b"), Holder("run", "a:1", 1), beat_seconds=3600.0)
    assert stays.handed_over
    leaver._write(replace(leaver._note, released=True))
    wait_until("hold again", lambda: json.loads(store().read(LEASE_NAME))["token"] == stays._note.token)
    assert not json.loads(store().read(LEASE_NAME))["released"]
    stays.release()
    leaver._ends.set()


def test_one_that_had_it_for_a_moment_does_not_leave_it_to_others(store):
    """A replica that was the first for a moment, and came to hold the store only when it was so no more."""
    stays = Lease(store(), Holder("run", "a:1", 1), beat_seconds=0.2)
    Lease(store("b"), Holder("run", "a:1", 1), beat_seconds=3600.0).release()
    wait_until("hold again", lambda: not json.loads(store().read(LEASE_NAME))["released"])
    with pytest.raises(MisusedJob, match="in use by"):
        Lease(store("c"), Holder("other", "b:1", 1), beat_seconds=30.0)
    stays.release()
    assert json.loads(store().read(LEASE_NAME))["released"]


def test_an_earlier_start_does_not_win_by_its_term(store):
    """Somebody removed the object, and the later start began to count anew."""
    earlier = Lease(store(), Holder("run", "a:1", 1), beat_seconds=3600.0)
    earlier._note = replace(earlier._note, term=20)
    store().remove([LEASE_NAME])
    later = Lease(store("b"), Holder("run", "a:2", 2), beat_seconds=3600.0)
    with pytest.raises(MisusedJob, match="was taken over"):
        earlier.require()
    later.require()
    # Whatever the earlier one wrote last, it is to see that the job has gone on.
    earlier._write(earlier._note)
    later.release()
    note = json.loads(store().read(LEASE_NAME))
    assert (note["token"], note["released"]) == (later._note.token, True)
    earlier._ends.set()


def test_what_cannot_be_understood_is_somebody_elses_and_not_late(store):
    one = Lease(store(), Holder("run", "a:1", 1), beat_seconds=3600.0)
    store().write(LEASE_NAME, b'{"version": 9}')
    with pytest.raises(MisusedJob, match="a process whose note cannot be read"):
        one.require()
    one._ends.set()


def hold_publishing(monkeypatch, step):
    """Whether it is about to publish that step, and what lets it."""
    held, go_on = threading.Event(), threading.Event()
    real = ObjectStoreFolder.publish

    def publish(folder, beside, manifest, target):
        if manifest.step == step:
            held.set()
            assert go_on.wait(PATIENCE_SECONDS)
        return real(folder, beside, manifest, target)

    monkeypatch.setattr(ObjectStoreFolder, "publish", publish)
    return held, go_on


def test_those_that_train_together_hand_over_while_one_still_writes(store, monkeypatch):
    first = Checkpointer(store(), holder=Holder("run", "a:1", 1))
    second = Checkpointer(store("b"), holder=Holder("run", "a:1", 2), opens=False)
    held, go_on = hold_publishing(monkeypatch, 1)
    first.save(1, State(state(1), {}, {"step": 1}), {})
    assert held.wait(PATIENCE_SECONDS)
    second.rebind(0, 1, None)
    put(second, 2)
    go_on.set()
    first.wait()
    assert (first.last_error, second.last_error) == (None, None)
    assert there(store) == ({FIRST, SECOND}, set())
    first.close()
    second.close()


def test_a_bucket_that_is_not_there(store, bucket, tmp_path):
    nowhere = ObjectStore("s3://no-such-bucket/x", tmp_path / "n")
    nowhere.make_cache()
    with pytest.raises(InvalidInput, match=r"s3://no-such-bucket/x: its bucket does not exist .*create it first"):
        Checkpointer(nowhere)
    with pytest.raises(InvalidInput, match="create it first"):
        nowhere.probe()


def test_a_store_that_does_not_answer_costs_the_checkpoint_and_nothing_else(writer, store, monkeypatch):
    put(writer, 1)
    monkeypatch.setattr("pollux.storage.object_store._PAUSES", ())
    monkeypatch.setattr(store().__class__, "_put", lambda *arguments: (_ for _ in ()).throw(OSError("no route")))
    put(writer, 2)
    assert isinstance(writer.last_error, Unreachable)
    assert "no route" in str(writer.last_error)
    monkeypatch.undo()
    assert there(store) == ({FIRST}, set())
    put(writer, 2)
    assert writer.last_error is None


def test_the_age_of_the_newest_is_known_to_those_that_did_not_write_it(writer, store):
    other = Checkpointer(store("b"), opens=False)
    told: list[float | None] = []
    other.find_created(told.append)
    wait_until("answer", lambda: told == [None])
    put(writer, 1)
    other.find_created(told.append)
    wait_until("answer", lambda: len(told) == 2)
    assert abs(time.time() - told[1]) < 300


def test_one_that_ends_late_removes_nothing_newer(store, monkeypatch):
    first = Checkpointer(store(), keep=1, holder=Holder("run", "a:1", 1))
    second = Checkpointer(store("b"), keep=1, holder=Holder("run", "a:1", 2), opens=False)
    held, go_on = hold_publishing(monkeypatch, 1)
    first.save(1, State(state(1), {}, {"step": 1}), {})
    assert held.wait(PATIENCE_SECONDS)
    second.rebind(0, 1, None)
    put(second, 2)
    go_on.set()
    first.wait()
    assert SECOND in there(store)[0]
    first.close()
    second.close()


def test_training_does_not_wait_for_what_is_sent_and_a_stop_gives_it_up(writer, store, monkeypatch, caplog):
    sent, go_on, attempts = threading.Event(), threading.Event(), []
    real = ObjectStore._put

    def slow(where, path, name, proceed):
        if name.startswith(FIRST):
            attempts.append(name)
            sent.set()
            while not go_on.wait(0.05):
                proceed()
        real(where, path, name, proceed)

    monkeypatch.setattr(ObjectStore, "_put", slow)
    assert writer.save(1, State(state(1), {}, {}), {})
    assert sent.wait(PATIENCE_SECONDS)
    assert not writer.save(2, State(state(2), {}, {}), {})
    put(writer, 3)
    assert writer.last_error is None
    assert len(attempts) == 1, "what was given up was sent again"
    assert "could not be" not in caplog.text
    assert there(store) == ({"step-0000000003"}, set())


def test_what_was_brought_before_an_end_in_between_is_not_brought_again(writer, store, monkeypatch):
    put(writer, 1)
    key = key_of(store, FIRST)
    content = store().read(f"{key}/{MANIFEST_NAME}")
    machine, brought = store("b"), []
    real = machine.download

    def download(name, path):
        brought.append(name)
        if len(brought) == 2:
            raise Unreachable("gone")
        real(name, path)

    machine.download = download
    with pytest.raises(Unreachable):
        fetch(machine, FIRST, key, content)
    fetch(machine, FIRST, key, content)
    assert brought.count(brought[0]) == 1


def test_a_note_of_another_version_is_watched_before_it_is_replaced(store):
    store().write(LEASE_NAME, b'{"version": 9}')
    began = time.monotonic()
    ObjectStoreFolder(store(), Holder(), beat_seconds=0.2).release()
    assert time.monotonic() - began >= 0.6
    assert json.loads(store().read(LEASE_NAME))["released"]


def test_a_hold_that_comes_after_the_end_is_let_go(store, monkeypatch):
    """A store took its time to answer a replica that was to write, and has left since."""
    opened, go_on = threading.Event(), threading.Event()
    real = FolderHold.open

    def late(hold):
        opened.set()
        assert go_on.wait(PATIENCE_SECONDS)
        real(hold)

    joiner = Checkpointer(store(), holder=Holder("run", "a:1", 1), opens=False)
    monkeypatch.setattr(FolderHold, "open", late)
    joiner.rebind(0, 1, None)
    assert opened.wait(PATIENCE_SECONDS)
    joiner.close()
    go_on.set()
    joiner._hold._acquiring.join(PATIENCE_SECONDS)
    assert json.loads(store().read(LEASE_NAME))["released"]
