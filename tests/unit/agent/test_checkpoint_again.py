"""A step that is saved a second time: the newer replaces the older, whole or not at all.

Run as a script, this file plays the writers that are killed for `test_kills_while_a_step_is_saved_again`.
"""

import errno
import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tests.unit.agent.saved_steps import flip, names, newest, put, state

from pollux.agent.checkpoint import folder
from pollux.agent.checkpoint.checkpointer import Checkpointer
from pollux.agent.checkpoint.reader import load, parameter_signature, read_saved
from pollux.agent.checkpoint.state import State
from pollux.testing.waiting import PATIENCE_SECONDS


def again(checkpointer: Checkpointer, step: int, **changed: Any) -> None:
    """Save the state of `put` for a step with something changed in it."""
    state_of = {"tensors": state(step), "objects": {"user": {"step": step}}, "values": {"step": step}}
    signature = parameter_signature(state(step))
    checkpointer.save(step, State(**{**state_of, **changed}), signature, wait=True)
    assert checkpointer.last_error is None, checkpointer.last_error


@pytest.mark.parametrize(
    "changed",
    [
        {"values": {"step": 1, "epoch": 1}},
        {"objects": {"user": {"step": 1, "accuracy": 0.5}}},
        {"tensors": {**state(1), "model.weight": torch.full((4, 3), 7.0)}},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_a_step_saved_again_with_other_content_replaces_the_first(writer, changed):
    put(writer, 0, 1)
    again(writer, 1, **changed)
    assert names(writer) == {"step-0000000000", "step-0000000001-1"}
    saved = newest(writer)
    assert saved == writer.last_saved == read_saved(saved.path)
    loaded = load(saved)
    for kind in ("values", "objects"):
        assert getattr(loaded, kind) == changed.get(kind, getattr(loaded, kind))
    assert torch.equal(loaded.tensors["model.weight"], changed.get("tensors", state(1))["model.weight"])
    again(writer, 1, values={"step": 1, "epoch": 2})
    assert newest(writer).manifest.values == {"step": 1, "epoch": 2}
    assert names(writer) == {"step-0000000000", "step-0000000001-2"}


def test_the_highest_number_is_the_newest_and_the_others_are_its_fallback(writer):
    put(writer, 1)
    for number in (2, 10):
        again(writer, 1, values={"number": number})
        (writer.folder / "step-0000000001-1").rename(writer.folder / f".step-0000000001-{number}")
        put(writer, 1)
    for number in (2, 10):
        (writer.folder / f".step-0000000001-{number}").rename(writer.folder / f"step-0000000001-{number}")
    assert newest(writer).path.name == "step-0000000001-10"
    flip(writer.folder / "step-0000000001-10" / "__0_0.distcp", 300)
    with pytest.warns(UserWarning, match="step-0000000001-10"):
        assert newest(writer).manifest.values == {"number": 2}


def test_replaced_ones_do_not_count_among_those_kept(tmp_path, monkeypatch):
    checkpointer = Checkpointer(tmp_path / "c", keep=3)
    put(checkpointer, 1, 2)
    with monkeypatch.context() as patch:
        # As after a death between publishing and removing.
        patch.setattr(folder.CheckpointFolder, "retain", lambda *arguments: None)
        again(checkpointer, 2, values={"step": 2, "epoch": 1})
    assert names(checkpointer) == {"step-0000000001", "step-0000000002", "step-0000000002-1"}
    put(checkpointer, 3)
    assert names(checkpointer) == {"step-0000000001", "step-0000000002-1", "step-0000000003"}
    checkpointer.drop_after(1)
    assert names(checkpointer) == {"step-0000000001"}
    checkpointer.close()


def test_a_failed_second_save_of_a_step_leaves_the_first(writer, monkeypatch):
    put(writer, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        writer.save(1, State(state(1), {}, {"epoch": 1}), {}, wait=True)
    assert isinstance(writer.last_error, OSError)
    assert newest(writer).manifest.values == {"step": 1}
    assert names(writer) == {"step-0000000001"}


def test_kills_while_a_step_is_saved_again(tmp_path):
    root = str(Path(__file__).resolve().parents[3])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    result = subprocess.run(
        [sys.executable, __file__, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["problems"] == []
    assert found["operations"] > 10
    assert found["kept_old"] > 3
    assert found["had_new"] > 1


def save_again_and_die(path: Path, number: int) -> None:
    """Replace the checkpoint of step 5 and die at this file operation; exits with 0 where there were fewer."""
    checkpointer = Checkpointer(path, keep=1)
    left = [number]

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        watched = {"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "shutil.rmtree"}
        if event in watched and str(arguments[0]).startswith(str(path)):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    checkpointer.save(5, State(state(number), {"user": number}, {"number": number}), {}, wait=True)


def kill_at_every_operation(path: Path) -> dict[str, Any]:
    """One writer after the other, each killed one file operation later, until one survives; what was found after."""
    first = Checkpointer(path, keep=1)
    first.save(5, State(state(0), {"user": 0}, {"number": 0}), {}, wait=True)
    first.close()
    kept: object = 0
    found: list[bool] = []
    problems = []
    for number in range(1, 200):
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            try:
                save_again_and_die(path, number)
            finally:
                os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        look = Checkpointer(path, keep=1)
        saved = newest(look)
        look.close()
        loaded = load(saved)
        seen = saved.manifest.values["number"]
        if seen not in ([number] if code == 0 else [kept, number]):
            problems.append(f"found {seen} after {number}")
        if loaded.objects["user"] != seen or set(loaded.tensors["model.weight"].flatten().tolist()) != {seen}:
            problems.append(f"what was found after {number} is not of one piece")
        found.append(seen == number)
        kept = seen
        if code == 0:
            break
    return {"problems": problems, "operations": len(found), "kept_old": found.count(False), "had_new": sum(found)}


if __name__ == "__main__":
    warnings.simplefilter("error")
    print(json.dumps(kill_at_every_operation(Path(sys.argv[1]) / "c")))
