"""The process that forks replicas: what they see, how they end, and that none is left behind."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pollux.core.errors import InvalidInput
from pollux.testing.jobs.replica_server import ReplicaServer, load_module
from pollux.testing.waiting import PATIENCE_SECONDS, OutOfTime, wait_until

HERE = str(Path(__file__))
PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")


def place(extra: int) -> dict[str, Any]:
    import numpy as np

    seen: dict[str, Any] = {name: os.environ.get(name) for name in PLACE}
    return {**seen, "extra": extra, "array": np.arange(3), "own": os.environ.get("OWN"), "exact": 0.1 + 0.2}


def test_replicas_see_what_torchrun_would_set(replica_server):
    results = replica_server.run(f"{HERE}:place", 2, {"extra": 7}, {"OWN": "yes"})
    assert [result["RANK"] for result in results] == ["0", "1"]
    assert results[1] == {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "extra": 7,
        "array": [0, 1, 2],
        "own": "yes",
        "exact": 0.1 + 0.2,
    }


def test_a_replica_alone_sees_none_of_it(replica_server):
    (result,) = replica_server.run(f"{HERE}:place", 1, {"extra": 0})
    assert {result[name] for name in PLACE} == {None}


def end(how: str) -> None:
    print("said before the end")
    if how == "error":
        raise InvalidInput("no good")
    if how == "exit":
        sys.exit(5)
    if how == "signal":
        os.kill(os.getpid(), signal.SIGTERM)
    if how == "hang":
        child = os.fork()
        Path(os.environ["NOTE"]).write_text(f"{os.getpid()} {child or os.getpid()}")
        time.sleep(600)


@pytest.mark.parametrize(
    ("how", "code", "error"), [("error", 1, "InvalidInput"), ("exit", 5, "SystemExit"), ("signal", -15, "")]
)
def test_how_they_end_is_told(replica_server, how, code, error):
    (result,) = replica_server.start(f"{HERE}:end", 1, {"how": how}).wait()
    assert (result.exit_code, result.error) == (code, error)
    if how != "signal":
        assert "said before the end" in result.output


def test_run_says_what_failed(replica_server):
    with pytest.raises(AssertionError, match=r"(?s)replica 0 of 1: exit code 1.*no good") as failed:
        replica_server.run(f"{HERE}:end", 1, {"how": "error"})
    assert not isinstance(failed.value, OutOfTime)


def test_run_tells_what_took_too_long_from_what_failed(replica_server, tmp_path):
    with pytest.raises(OutOfTime, match=r"did not finish within 0\.2 s"):
        replica_server.run(f"{HERE}:end", 1, {"how": "hang"}, {"NOTE": str(tmp_path / "note")}, timeout=0.2)


def test_one_that_hangs_is_killed_with_what_it_started(replica_server, tmp_path):
    note = tmp_path / "note"
    running = replica_server.start(f"{HERE}:end", 1, {"how": "hang"}, {"NOTE": str(note)})
    wait_until("note", note.exists)
    deadline = time.monotonic() + PATIENCE_SECONDS
    (result,) = running.wait(timeout=0.1)
    assert result.exit_code == -signal.SIGKILL
    for number in {int(word) for word in note.read_text().split()}:
        while Path(f"/proc/{number}/stat").exists() and time.monotonic() < deadline:
            if Path(f"/proc/{number}/stat").read_text().split()[2] == "Z":
                break
            time.sleep(0.005)
        else:
            assert not Path(f"/proc/{number}").exists()


def test_closing_the_server_ends_what_still_runs(tmp_path):
    note = tmp_path / "note"
    with ReplicaServer() as server:
        running = server.start(f"{HERE}:end", 1, {"how": "hang"}, {"NOTE": str(note)})
        (process,) = running.processes
    assert not Path(f"/proc/{process}").exists()
    server.close()


def test_modules_by_name_and_by_file():
    assert load_module("json").__name__ == "json"
    assert load_module(HERE) is load_module(HERE)
