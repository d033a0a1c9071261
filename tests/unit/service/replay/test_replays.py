from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from tests.replaying import held_child

from pollux.core.errors import Conflict, UnknownName
from pollux.service import create_app
from pollux.service.replay.replays import Progress, Replays, command_of
from pollux.service.replay.result import MOST_JOBS, shortened
from pollux.service.server import app as app_module
from pollux.testing.servers.service import SAMPLE_MODEL, result_of, sample_report
from pollux.testing.waiting import PATIENCE_SECONDS


def child(code):
    return (sys.executable, "-c", code)


def ended(replays, replay, seconds=PATIENCE_SECONDS):
    until = time.monotonic() + seconds
    while replay.state == "running" and time.monotonic() < until:
        time.sleep(0.02)
    return replay


def wait_for(condition, seconds=PATIENCE_SECONDS):
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    assert condition()


def document(num_jobs=3):
    jobs = [{"name": f"j{i}", "application": "x", "submitted": 0.0, "finished": float(i)} for i in range(num_jobs)]
    return {"runs": [{"nodes": 2, "config": {"gpus_per_node": 4, "applications": {}}, "results": [
        {"policy": "fifo", "avg_jct_hours": 1.0, "jobs": jobs}
    ]}]}  # fmt: skip


def test_a_replay_from_begin_to_end():
    code = f"import json; print(json.dumps({document()!r}))"
    replays = Replays(lambda: [b"line\n"], child(code))
    replay = ended(replays, replays.start(["fifo"], ["+1"]))
    assert (replay.state, replay.progress, replay.detail) == ("done", 1.0, "")
    (run,) = json.loads(replay.result)["runs"]
    assert (run["nodes"], run["config"]) == (2, {"gpus_per_node": 4})
    assert run["results"][0]["num_jobs"] == 3
    assert replays.get(replay.id) is replay
    assert json.loads(replay.to_json())["result"]["runs"] == [run]
    replays.close()
    with pytest.raises(Conflict):
        replays.start(["fifo"], [])


def test_what_the_child_is_told(tmp_path):
    words = command_of(tmp_path / "h", ["pollux", "fifo"], ["+2", "-1"])
    assert words == [
        "whatif", "--json", "--history", str(tmp_path / "h"), "--workers", "1", "--policy", "pollux,fifo",
        "--nodes=+2,-1",
    ]  # fmt: skip
    assert "--nodes" not in " ".join(command_of(tmp_path, ["fifo"], []))


def test_how_far_it_is_is_told_whatever_terminal_the_service_was_started_from(monkeypatch):
    for name, value in {"TERM": "dumb", "NO_COLOR": "1", "TTY_COMPATIBLE": "0", "COLUMNS": "20"}.items():
        monkeypatch.setenv(name, value)
    code = """
import time
from pollux.cli.display.render import progress_bar
with progress_bar("fifo") as update:
    update(1, 2)
    time.sleep(600)
"""
    replays = Replays(list, child(code))
    replay = replays.start(["fifo"], [])
    wait_for(lambda: replay.progress > 0)
    replays.close()


def test_a_failure_is_told_in_its_own_words():
    code = "import sys; print('\\x1b[31merror: no job can be replayed\\x1b[0m', file=sys.stderr); sys.exit(2)"
    replays = Replays(list, child(code))
    replay = ended(replays, replays.start(["fifo"], []))
    assert (replay.state, replay.detail) == ("failed", "no job can be replayed")
    replay = ended(replays, Replays(list, child("print('{')")).start(["fifo"], []))
    assert replay.state == "failed"

    killed = Replays(list, child("import os; os.kill(os.getpid(), 9)"))
    assert "more than 30 min" in ended(killed, killed.start(["fifo"], [])).detail
    large = Replays(list, child("raise MemoryError"))
    assert "8 GiB" in ended(large, large.start(["fifo"], [])).detail

    def broken():
        raise RuntimeError("no history")

    failing = Replays(broken, child(""))
    assert "no history" in ended(failing, failing.start(["fifo"], [])).detail


def test_one_at_a_time_and_cancelled_when_asked():
    replays = Replays(list, child("import time; time.sleep(600)"))
    first = replays.start(["fifo"], [])
    with pytest.raises(Conflict, match="under way"):
        replays.start(["fifo"], [])
    wait_for(lambda: replays._process is not None)
    process = replays._process
    assert replays.cancel(first.id).state == "cancelled"
    assert process.returncode is not None
    second = replays.start(["fifo"], [])
    wait_for(lambda: replays._process is not None)
    process = replays._process
    replays.close()
    assert second.state == "cancelled"
    assert process.returncode is not None
    assert replays.cancel(first.id).state == "cancelled"
    with pytest.raises(UnknownName):
        replays.get("none")


def test_a_child_ends_with_its_service(tmp_path):
    """A service that is killed leaves no replay behind."""
    place = tmp_path / "pid"
    spin = f"import os, time; open({str(place)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    # The child's own beginning, with something else than the command line at its end.
    code = f"""
import os, sys, time
from pollux.service.replay import replays as children
replays = children.Replays(list, (sys.executable, "-c", children._CHILD.partition("from pollux")[0] + {spin!r}))
replays.start(["fifo"], [])
deadline = time.monotonic() + 60
while not (os.path.exists({str(place)!r}) and open({str(place)!r}).read()) and time.monotonic() < deadline:
    time.sleep(0.02)
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", code], timeout=PATIENCE_SECONDS, check=False)
    pid = int(place.read_text())

    def gone():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        # Nobody may be there to reap it.
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()

    wait_for(gone)


def test_the_bar_is_read():
    progress = Progress(2)
    assert progress.share == 0.0
    progress.take(b"\x1b[2Ksimulating \xe2\x94\x81  5/10 jobs 0:00:01 left: 0:00:09\r")
    assert progress.share == 0.25
    progress.take(b"simulating 10/10 jobs")
    assert progress.share == 0.5
    progress.take(b"simulating 0/10 jobs 3/10 jobs")
    assert progress.share == 0.65
    progress.take(b"simulating 10/1")
    assert progress.share == 0.65, "the number is not whole yet"
    progress.take(b"0/0 jobs")
    assert 0.0 <= progress.share <= 1.0


def test_only_the_last_few_are_kept():
    replays = Replays(list, child("print('{\"runs\": []}')"))
    first = ended(replays, replays.start(["fifo"], []))
    for _ in range(8):
        replays._thread.join(PATIENCE_SECONDS)
        replays._kept[str(len(replays._kept))] = first
    replays._thread.join(PATIENCE_SECONDS)
    ended(replays, replays.start(["fifo"], []))
    assert len(replays._kept) == 8
    with pytest.raises(UnknownName):
        replays.get(first.id)


def test_what_it_came_to_is_read_outside_of_the_service(monkeypatch):
    """However large it is, the service's own process never parses it."""
    code = f"import json; print(json.dumps({document()!r}))"
    replays = Replays(list, child(code))
    monkeypatch.setattr("pollux.service.replay.result.shortened", lambda document: pytest.fail("parsed here"))
    monkeypatch.setattr(json, "loads", lambda text: pytest.fail("parsed here"))
    replay = ended(replays, replays.start(["fifo"], []))
    assert replay.state == "done", replay.detail
    monkeypatch.setattr("pollux.service.replay.replays._LARGEST_RESULT", 10)
    replay = ended(replays, replays.start(["fifo"], []))
    assert (replay.state, "too large" in replay.detail) == ("failed", True)


def test_what_was_left_out_is_told():
    whole = {**document(), "left_out": ["job 'x': its model is not known"]}
    whole["runs"][0]["left_out"] = ["job 'y' needs 16 GPUs"]
    short = shortened(whole)
    assert short["left_out"] == ["job 'x': its model is not known"]
    assert short["runs"][0]["left_out"] == ["job 'y' needs 16 GPUs"]
    assert shortened(document())["left_out"] == []


def test_replays_are_found_again(client):
    replays = client.app._app.state.replays
    assert client.get("/v1/whatif").json() == {"replays": []}
    replays._child = child("import time; time.sleep(600)")
    begun = client.post("/v1/whatif", json={"policies": ["fifo"], "nodes": ["+1"]}).json()["id"]
    (found,) = client.get("/v1/whatif").json()["replays"]
    assert (found["id"], found["state"]) == (begun, "running")
    assert (found["policies"], found["nodes"]) == (["fifo"], ["+1"])
    assert client.post(f"/v1/whatif/{begun}/cancel").json()["state"] == "cancelled"
    replays._child = child("print('{\"runs\": []}')")
    replays._thread.join(PATIENCE_SECONDS)
    second = client.post("/v1/whatif", json={"policies": ["pollux"]}).json()["id"]
    assert [one["id"] for one in client.get("/v1/whatif").json()["replays"]] == [second, begun]


def test_many_jobs_are_thinned():
    (run,) = shortened(document(5 * MOST_JOBS))["runs"]
    (result,) = run["results"]
    assert (result["num_jobs"], len(result["jobs"])) == (5 * MOST_JOBS, MOST_JOBS)
    assert "application" not in result["jobs"][0]


@pytest.fixture
def client(world):
    app = create_app(world.engine, world.tokens)
    with TestClient(app, base_url="http://127.0.0.1:7341") as client:
        client.headers["authorization"] = f"Bearer {world.tokens.operator}"
        yield client
    app.close()


@pytest.mark.parametrize(
    "body",
    [
        [],
        {"policy": "fifo"},
        {"policies": []},
        {"policies": "fifo"},
        {"policies": ["fifo"] * 7},
        {"policies": ["fifo"], "nodes": ["2; rm"]},
        {"policies": ["fifo"], "nodes": ["0"]},
        {"policies": ["fifo"], "nodes": [2]},
    ],
)
def test_what_cannot_be_replayed_is_refused(client, body):
    assert client.post("/v1/whatif", json=body).status_code == 422


def test_a_policy_that_is_not_there(client):
    answer = client.post("/v1/whatif", json={"policies": ["polux"]})
    assert answer.status_code == 404
    assert "pollux" in answer.json()["error"]["message"]
    assert client.get("/v1/whatif/0123").status_code == 404


def test_the_real_replay_of_real_history(world, tmp_path, monkeypatch):
    go = tmp_path / "go"
    monkeypatch.setattr(app_module, "Replays", lambda history: Replays(history, held_child(go)))
    with TestClient(create_app(world.engine, world.tokens), base_url="http://127.0.0.1:7341") as client:
        client.headers["authorization"] = f"Bearer {world.tokens.operator}"
        _replay(world, client, go)


def _replay(world, client, go):
    for name in ("a", "b"):
        world.submit(name, max_gpus=2)
        world.backend.started(name)
        world.engine.loop.wait_until_idle()
        generation = world.engine.job(name).generation
        world.after(30.0)
        result_of(world.engine.report(name, sample_report(generation, 50.0, model=SAMPLE_MODEL)))
        world.after(60.0)
        result_of(world.engine.report(name, sample_report(generation, 1000.0, model=SAMPLE_MODEL, final=True)))
        world.backend.ended(name, "succeeded")
        world.engine.loop.wait_until_idle()
    begun = client.post("/v1/whatif", json={"policies": ["pollux", "fifo"], "nodes": ["+1"]})
    assert begun.status_code == 202, begun.text
    path = f"/v1/whatif/{begun.json()['id']}"
    seen = []

    def look(wanted):
        found = client.get(path).json()
        seen.append(found["progress"])
        return wanted(found)

    # Held after the first of two sizes: its own bar says that it is half way.
    wait_for(lambda: look(lambda found: found["state"] != "running" or found["progress"] >= 0.5), PATIENCE_SECONDS)
    assert (client.get(path).json()["state"], seen[-1]) == ("running", 0.5)
    go.touch()
    wait_for(lambda: look(lambda found: found["state"] != "running"), PATIENCE_SECONDS)
    assert seen == sorted(seen)
    found = client.get(path).json()
    assert (found["state"], found["progress"]) == ("done", 1.0), found
    runs = found["result"]["runs"]
    assert [run["nodes"] for run in runs] == [1, 2]
    for run in runs:
        assert [result["policy"] for result in run["results"]] == ["pollux", "fifo"]
        assert all(result["num_jobs"] == 2 and result["avg_jct_hours"] > 0 for result in run["results"])
    assert client.post(f"{path}/cancel").json()["state"] == "done"
    assert len(json.dumps(found)) < 100_000
