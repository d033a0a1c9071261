"""Checkpoints: saved as of the call, found when whole, skipped when damaged, loaded into what is there.

Sharded ones are in `test_checkpoint_sharded`, a step that is saved a second time in `test_checkpoint_again`.
"""

import errno
import hashlib
import os
import threading
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.unit.agent.saved_steps import flip, names, newest, put, state
from torch import nn

from pollux.agent.checkpoint import checkpointer as checkpointer_module
from pollux.agent.checkpoint import folder, host_buffers
from pollux.agent.checkpoint.checkpointer import Checkpointer
from pollux.agent.checkpoint.manifest import FORMAT, MANIFEST_NAME, encode, read_manifest
from pollux.agent.checkpoint.reader import load, parameter_signature, read_saved, tensor_layout
from pollux.agent.checkpoint.save_request import check_pickling
from pollux.agent.checkpoint.state import State
from pollux.core.errors import (
    CheckpointDamaged,
    CheckpointMismatch,
    InvalidInput,
    MisusedJob,
    NonFiniteValue,
)
from pollux.testing.waiting import PATIENCE_SECONDS


def test_what_was_saved_is_loaded(writer):
    put(writer, 3)
    assert writer.last_error is None
    saved = newest(writer)
    assert saved == writer.last_saved == read_saved(saved.path)
    assert saved.path == writer.folder / "step-0000000003"
    assert (saved.manifest.step, saved.manifest.num_replicas, saved.manifest.values) == (3, 1, {"step": 3})
    loaded = load(saved)
    assert loaded.objects == {"user": {"step": 3}}
    assert loaded.values == {"step": 3}
    assert loaded.tensors.keys() == state(3).keys()
    assert all(torch.equal(loaded.tensors[name], tensor) for name, tensor in state(3).items())
    assert tensor_layout(saved)["model.weight"] == (torch.Size([4, 3]), torch.float32)


def test_given_tensors_are_filled_in_place_and_the_others_are_new(writer):
    put(writer, 3)
    layer = nn.Linear(3, 4, bias=False)
    loaded = load(newest(writer), {"model.weight": layer.weight})
    assert (layer.weight == 3).all()
    assert layer.weight.requires_grad
    assert list(loaded.tensors) == ["optimizer.state.weight.step"]


def test_no_checkpoint_is_none(writer):
    assert writer.latest() is None


def test_tied_tensors_come_back_tied(writer):
    weight = torch.randn(4)
    writer.save(1, State({"model.a": weight, "model.b": weight}, {}, {}), {}, wait=True)
    fresh = load(newest(writer)).tensors
    assert fresh["model.a"] is fresh["model.b"]
    a, b = torch.empty(4), torch.empty(4)
    load(newest(writer), {"model.a": a, "model.b": b})
    assert torch.equal(a, weight)
    assert torch.equal(b, weight)
    only = load(newest(writer), {"model.a": a}).tensors
    assert torch.equal(only["model.b"], weight)
    assert only["model.b"].data_ptr() != a.data_ptr()


def test_plain_dcp_loads_it_into_a_plain_module(writer):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    writer.save(1, State(tensors, {"scheduler": {"last_epoch": 3}}, {}), {}, wait=True)
    other = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    found: dict[str, Any] = {"model": other.state_dict(), "scheduler": None}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(found, checkpoint_id=newest(writer).path)
    other.load_state_dict(found["model"])
    assert found["scheduler"] == {"last_epoch": 3}
    for (name, mine), (_, theirs) in zip(model.state_dict().items(), other.state_dict().items(), strict=True):
        assert torch.equal(mine, theirs), name


def test_what_changes_after_the_call_is_not_saved(writer, monkeypatch):
    begin = threading.Event()
    write = host_buffers.write_files

    def write_later(*arguments, **options):
        assert begin.wait(PATIENCE_SECONDS)
        return write(*arguments, **options)

    monkeypatch.setattr(checkpointer_module, "write_files", write_later)
    tensors, user, values = state(1), {"list": [1]}, {"list": [1]}
    writer.save(1, State(tensors, {"user": user}, values), {})
    assert writer.busy
    tensors["model.weight"].fill_(99)
    user["list"].append(2)
    values["list"].append(2)
    begin.set()
    loaded = load(newest(writer))
    assert not writer.busy
    assert (loaded.tensors["model.weight"] == 1).all()
    assert loaded.objects == {"user": {"list": [1]}}
    assert loaded.values == {"list": [1]}


def test_one_in_flight(writer, monkeypatch):
    running = []
    write = host_buffers.write_files

    def write_watched(*arguments, **options):
        running.append(sum(thread.name.startswith("checkpoint-") for thread in threading.enumerate()))
        return write(*arguments, **options)

    monkeypatch.setattr(checkpointer_module, "write_files", write_watched)
    for step in range(5):
        writer.save(step, State(state(step), {}, {}), {})
    writer.wait()
    assert running == [1] * 5
    assert newest(writer).manifest.step == 4


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_stay(tmp_path, keep):
    checkpointer = Checkpointer(tmp_path / "c", keep=keep)
    put(checkpointer, *range(5))
    assert names(checkpointer) == {f"step-{step:010d}" for step in range(5 - keep, 5)}
    checkpointer.close()


def test_older_ones_are_removed_only_after_the_newer_is_published(writer, monkeypatch):
    put(writer, 1, 2)
    seen = []
    discard = folder.CheckpointFolder.discard

    def watched(self, path):
        seen.append(read_saved(writer.folder / "step-0000000003").manifest.step)
        discard(self, path)

    monkeypatch.setattr(folder.CheckpointFolder, "discard", watched)
    put(writer, 3)
    assert seen == [3]


def test_after_a_roll_back_later_ones_are_dropped(writer):
    put(writer, 1, 2)
    writer.drop_after(1)
    assert newest(writer).manifest.step == 1
    put(writer, 2)
    assert newest(writer).manifest.step == 2


def test_the_last_whole_one_is_not_dropped_before_there_is_another(writer):
    put(writer, 3, 4)
    writer.drop_after(2)
    assert names(writer) == {"step-0000000003"}, "the nearest stays"
    writer.drop_after(2)
    assert newest(writer).manifest.step == 3
    put(writer, 2)
    assert names(writer) == {"step-0000000002"}, "and goes with the first save on the new course"


def test_a_damaged_one_is_no_reason_to_drop_the_last_whole_one(writer):
    put(writer, 1, 2)
    flip(writer.folder / "step-0000000001" / "__0_0.distcp", 300)
    writer.drop_after(1)
    assert newest(writer).manifest.step == 2


def test_where_none_is_whole_nothing_is_dropped(writer):
    put(writer, 1, 2)
    for name in names(writer):
        flip(writer.folder / name / "__0_0.distcp", 300)
    writer.drop_after(0)
    assert names(writer) == {"step-0000000001", "step-0000000002"}


def test_a_spared_one_stays_when_the_next_save_fails(writer, monkeypatch):
    put(writer, 3)
    writer.drop_after(2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        put(writer, 2)
    assert newest(writer).manifest.step == 3


def test_a_name_once_known_as_damaged_can_be_used_again(writer):
    put(writer, 1, 2)
    flip(writer.folder / "step-0000000002" / "__0_0.distcp", 300)
    with pytest.warns(UserWarning, match="damaged"):
        writer.latest()
    writer.drop_after(1)
    put(writer, 2)
    assert names(writer) == {"step-0000000001", "step-0000000002"}
    assert newest(writer).manifest.step == 2


def test_a_just_published_one_of_an_older_step_stays(writer):
    put(writer, 8, 9, 5)
    assert names(writer) == {"step-0000000005", "step-0000000009"}


DAMAGE = {
    "a flipped byte in the shard": lambda path: flip(path / "__0_0.distcp", 300),
    "a flipped byte at the shard's end": lambda path: flip(path / "__0_0.distcp", -1),
    "a flipped byte in DCP's metadata": lambda path: flip(path / ".metadata", 40),
    "a flipped byte in the manifest": lambda path: flip(path / MANIFEST_NAME, 200),
    "a flipped byte in the checksum": lambda path: flip(path / MANIFEST_NAME, 20),
    "a truncated shard": lambda path: os.truncate(path / "__0_0.distcp", 100),
    "a truncated metadata": lambda path: os.truncate(path / ".metadata", 10),
    "a truncated manifest": lambda path: os.truncate(path / MANIFEST_NAME, 100),
    "an empty manifest": lambda path: os.truncate(path / MANIFEST_NAME, 0),
    "a missing shard": lambda path: (path / "__0_0.distcp").unlink(),
    "a missing metadata": lambda path: (path / ".metadata").unlink(),
    "a missing manifest": lambda path: (path / MANIFEST_NAME).unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_one_is_skipped_before_anything_is_unpickled(writer, damage):
    put(writer, 1, 2)
    damage(writer.folder / "step-0000000002")
    with mock.patch("pickle.load", side_effect=AssertionError("unpickled")):
        with pytest.warns(UserWarning, match="skipped a damaged checkpoint.*step-0000000002"):
            assert newest(writer).manifest.step == 1
        assert newest(writer).manifest.step == 1, "and the warning comes once"
    assert (load(newest(writer)).tensors["model.weight"] == 1).all()
    damage(writer.folder / "step-0000000001")
    with (
        pytest.warns(UserWarning, match="step-0000000001"),
        pytest.raises(CheckpointDamaged, match=r"none of the 2 checkpoints.*another folder"),
    ):
        writer.latest()


def test_a_renamed_folder_is_not_another_step(writer):
    put(writer, 1)
    (writer.folder / "step-0000000001").rename(writer.folder / "step-0000000009")
    with pytest.warns(UserWarning, match="of step 1"), pytest.raises(CheckpointDamaged):
        writer.latest()


def test_a_damaged_one_does_not_count_among_those_kept(writer):
    put(writer, 1, 2)
    flip(writer.folder / "step-0000000002" / "__0_0.distcp", 300)
    with pytest.warns(UserWarning, match="damaged"):
        writer.latest()
    put(writer, 3)
    assert {name for name in names(writer) if not name.startswith(".damaged")} == {"step-0000000001", "step-0000000003"}


def test_a_damaged_one_of_the_same_step_is_moved_aside(writer):
    put(writer, 1)
    flip(writer.folder / "step-0000000001" / "__0_0.distcp", 300)
    put(writer, 1)
    assert (load(newest(writer)).tensors["model.weight"] == 1).all()
    assert any(name.startswith(".damaged-step-0000000001") for name in names(writer))


def test_what_dead_writers_left_is_ignored_and_removed(writer):
    stale = writer.folder / ".tmp-7-0123abcd"
    stale.mkdir(parents=True)
    (stale / "__0_0.distcp").write_bytes(b"half")
    assert writer.latest() is None
    put(writer, 1)
    assert names(writer) == {"step-0000000001"}


def test_another_format_is_said_not_skipped(writer):
    put(writer, 1)
    path = writer.folder / "step-0000000001"
    other = encode(read_manifest(path)).replace(f'"format": {FORMAT}'.encode(), b'"format": 999')
    body = other.partition(b'",')[2]
    (path / MANIFEST_NAME).write_bytes(b'{\n "checksum": "' + hashlib.sha256(body).hexdigest().encode() + b'",' + body)
    with pytest.raises(CheckpointMismatch, match="format 999"):
        writer.latest()


def test_another_model_is_refused_before_anything_changes(writer):
    put(writer, 1)
    saved = newest(writer)
    wide = {"model.weight": torch.zeros(4, 5), "optimizer.state.weight.step": torch.zeros(())}
    with pytest.raises(CheckpointMismatch, match=r"parameter model\.weight is \[4, 3\] float32 in.*\[4, 5\] float32"):
        load(saved, wide, signature=parameter_signature(wide))
    with pytest.raises(CheckpointMismatch, match=r"tensor model\.weight is \[4, 3\] float32"):
        load(saved, wide)
    good = torch.zeros(4, 3)
    with pytest.raises(CheckpointMismatch, match=r"tensor model\.bias is not in the checkpoint"):
        load(saved, {"model.weight": good, "model.bias": torch.zeros(1)})
    with pytest.raises(CheckpointMismatch, match="float64"):
        load(saved, {"model.weight": good.double()})
    assert (good == 0).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_parameters_that_are_not_finite_are_not_published(writer, value, caplog):
    put(writer, 1)
    bad = state(2)
    bad["model.weight"][1, 1] = value
    writer.save(2, State(bad, {}, {}), {}, wait=True)
    assert isinstance(writer.last_error, NonFiniteValue)
    assert "model.weight" in caplog.text
    assert "training goes on" in caplog.text
    assert names(writer) == {"step-0000000001"}
    writer.save(2, State(bad, {}, {}), {}, wait=True, finite=())
    assert writer.last_error is None
    assert newest(writer).manifest.step == 2


def test_only_the_tensors_named_must_be_finite(writer):
    mask = torch.full((3, 3), float("-inf")).triu(1)
    writer.save(
        1, State({**state(1), "model.mask": mask}, {}, {}), {}, wait=True, finite={"model.weight", "model.gone"}
    )
    assert writer.last_error is None
    assert torch.equal(load(newest(writer)).tensors["model.mask"], mask)
    bad = {**state(2), "model.mask": mask}
    bad["model.weight"][0, 0] = float("nan")
    writer.save(2, State(bad, {}, {}), {}, wait=True, finite={"model.weight"})
    assert isinstance(writer.last_error, NonFiniteValue)
    assert newest(writer).manifest.step == 1


def test_a_tied_tensor_must_be_finite_under_either_name(writer):
    weight = torch.full((2,), float("nan"))
    writer.save(1, State({"model.a": weight, "model.b": weight}, {}, {}), {}, wait=True, finite={"model.b"})
    assert isinstance(writer.last_error, NonFiniteValue)


def test_other_values_may_be_infinite(writer):
    tensors = {"optimizer.best": torch.tensor(float("inf")), "model.count": torch.tensor(3)}
    writer.save(1, State(tensors, {}, {"bound": float("inf")}), {}, wait=True)
    assert newest(writer).manifest.values == {"bound": float("inf")}


FAILING = {
    "a full disk": (host_buffers._DigestingStream, "write"),
    "no flush": (os, "fsync"),
    "no rename": (os, "rename"),
}


@pytest.mark.parametrize(("owner", "call"), FAILING.values(), ids=FAILING.keys())
def test_a_failed_write_leaves_the_older_ones_and_training_goes_on(writer, monkeypatch, caplog, owner, call):
    put(writer, 1)
    with monkeypatch.context() as patch:
        patch.setattr(owner, call, mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        put(writer, 2)
    assert isinstance(writer.last_error, OSError)
    assert "the checkpoint of step 2 was not written" in caplog.text
    assert "No space left" in caplog.text
    assert names(writer) == {"step-0000000001"}
    put(writer, 3)
    assert writer.last_error is None
    assert newest(writer).manifest.step == 3


def test_what_the_disk_changed_is_not_published(writer, monkeypatch):
    put(writer, 1)
    flush = folder.flush

    def damaging(path):
        flush(path)
        if path.suffix == ".distcp":
            flip(path, 300)

    monkeypatch.setattr(checkpointer_module, "flush", damaging)
    put(writer, 2)
    assert isinstance(writer.last_error, CheckpointDamaged)
    assert names(writer) == {"step-0000000001"}


def test_every_file_and_both_folders_are_flushed_before_the_older_one_goes(tmp_path, monkeypatch):
    flushed = []
    fsync = os.fsync

    def watched(descriptor):
        flushed.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    checkpointer = Checkpointer(tmp_path / "c")
    monkeypatch.setattr(os, "fsync", watched)
    put(checkpointer, 1)
    assert set(flushed[:2]) == {".metadata", "__0_0.distcp"}
    assert flushed[2] == MANIFEST_NAME
    assert flushed[3].startswith(".tmp-1-")
    assert flushed[4] == "c"
    checkpointer.close()


def test_an_object_that_cannot_be_pickled_is_refused_at_once_by_name(writer, caplog):
    bad = {"fine": {"list": [1]}, "user": {"hook": lambda: None}}
    for call in (check_pickling, lambda objects: writer.save(1, State(state(1), objects, {}), {})):
        with pytest.raises(InvalidInput, match=r"'user' of type dict cannot be pickled: .*lambda.*state_dict\(\)"):
            call(bad)
    assert not writer.busy
    assert names(writer) == set()
    assert caplog.text == "", "nothing was tried in the background"
    check_pickling({"fine": {"list": [1], "tensor": torch.zeros(1000)}})
    put(writer, 1)
    assert newest(writer).manifest.step == 1


def test_wrong_calls_are_refused_at_once(writer):
    with pytest.raises(InvalidInput, match="value 'rng'"):
        writer.save(1, State(state(1), {}, {"rng": torch.zeros(1)}), {})
    with pytest.raises(InvalidInput, match=r"both tensor and object: model\.weight"):
        writer.save(1, State(state(1), {"model.weight": 1}, {}), {})
    with pytest.raises(InvalidInput, match="step -1"):
        writer.save(-1, State(state(1), {}, {}), {})
    with pytest.raises(InvalidInput, match="keep is 0"):
        Checkpointer(writer.folder, keep=0)
    assert names(writer) == set()


def test_prepare_makes_the_memory_of_the_first_save(writer):
    writer.prepare({name: tensor.to("meta") for name, tensor in state(1).items()})
    held = {name: buffer.data_ptr() for name, buffer in writer._buffers._buffers.items()}
    put(writer, 1)
    assert {name: buffer.data_ptr() for name, buffer in writer._buffers._buffers.items()} == held


def test_two_jobs_cannot_share_a_folder(writer, tmp_path):
    with pytest.raises(MisusedJob, match=rf"{writer.folder} is in use by process {os.getpid()} on .*own folder"):
        Checkpointer(writer.folder)
    put(writer, 1)
    writer.close()
    second = Checkpointer(writer.folder)
    assert newest(second).manifest.step == 1
    second.close()


def test_a_forked_child_does_not_keep_the_folder(writer):
    arrived, leave = os.pipe(), os.pipe()
    with warnings.catch_warnings():
        # The child does nothing but wait, so threads that it does not have cannot hold it up.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        os.write(arrived[1], b"x")
        os.read(leave[0], 1)
        os._exit(0)
    try:
        os.read(arrived[0], 1)
        writer.close()
        Checkpointer(writer.folder).close()
    finally:
        os.write(leave[1], b"x")
        os.waitpid(child, 0)
        for end in (*arrived, *leave):
            os.close(end)


def test_folders_that_cannot_be_used_are_refused_at_once(tmp_path):
    with pytest.raises(InvalidInput, match=r"its parent .*missing does not exist"):
        Checkpointer(tmp_path / "missing" / "c")
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match="is a file"):
        Checkpointer(tmp_path / "file")


def test_a_disk_that_takes_nothing_now_is_said_and_tried_again_by_each_save(tmp_path, caplog):
    with mock.patch("os.open", side_effect=OSError(errno.EROFS, "Read-only file system")):
        checkpointer = Checkpointer(tmp_path / "c")
        assert "cannot be written to (Read-only file system); give a folder" in caplog.text
        assert checkpointer.latest() is None
        put(checkpointer, 1)
        assert "Read-only file system" in str(checkpointer.last_error)
    put(checkpointer, 2)
    assert checkpointer.last_error is None
    with pytest.raises(MisusedJob, match="in use by process"):
        Checkpointer(tmp_path / "c")
    checkpointer.close()
    with mock.patch("os.pwrite", side_effect=OSError(errno.ENOSPC, "No space left on device")):
        Checkpointer(tmp_path / "c").close()
    assert "its owner cannot be noted there (No space left on device)" in caplog.text
    Checkpointer(tmp_path / "c").close()


def test_a_file_system_without_locks_still_works(tmp_path, caplog):
    with mock.patch("fcntl.flock", side_effect=OSError(errno.ENOLCK, "No locks available")):
        checkpointer = Checkpointer(tmp_path / "c")
    assert "cannot be locked: No locks available" in caplog.text
    put(checkpointer, 1)
    assert newest(checkpointer).manifest.step == 1
    checkpointer.close()


def test_other_replicas_write_nothing_when_the_state_is_replicated(tmp_path):
    with mock.patch.object(checkpointer_module, "broadcast_bytes", return_value=b'{"value": "", "problem": null}'):
        checkpointer = Checkpointer(tmp_path / "c", replica=1, num_replicas=2)
        checkpointer.prepare(state(1))
        put(checkpointer, 1)
        assert checkpointer.latest() is None
        checkpointer.drop_after(0)
        with pytest.raises(InvalidInput, match="'user' of type function"):
            checkpointer.save(1, State(state(1), {"user": lambda: None}, {}), {})
    assert not (tmp_path / "c").exists()
    assert not checkpointer._buffers._buffers
