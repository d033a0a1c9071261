from __future__ import annotations

from dataclasses import replace

from pollux.service.presenters.explanations import explanation_of
from pollux.service.views.job_board import JobEntry
from pollux.testing.servers.service import result_of, sample_report


def both(client, job_id):
    """What the list and `pollux explain` say about a job."""
    listed = client.get("/v1/jobs").json()["explanations"][job_id]
    alone = client.get(f"/v1/jobs/{job_id}/explain").json()
    return listed, {"text": alone["text"], "jobs": alone["jobs"]}


def runs(world, name, **fields):
    world.submit(name, **fields)
    world.backend.started(name)
    world.engine.loop.wait_until_idle()


def in_state(world, job_id, state):
    entries = world.backend._entries
    entries[job_id] = replace(entries[job_id], state=state)


def test_the_list_has_the_cost_that_explain_adds(world, client):
    runs(world, "a", max_gpus=2)
    listed, alone = both(client, "a")
    assert listed == alone
    assert "costs it about" not in listed["text"]
    generation = world.engine.job("a").generation
    result_of(world.engine.report("a", sample_report(generation, resize_seconds=6.0, resize_kind="restart")))
    listed, alone = both(client, "a")
    assert listed == alone
    assert listed["text"].endswith(". As of now, a change of its GPUs costs it about 6 s, with a restart")


def test_for_whom_a_job_waits_is_of_the_moment_though_nothing_happens_to_the_job(world, client):
    runs(world, "holds", min_gpus=1, max_gpus=1)
    world.submit("comes", max_gpus=1)
    assert str(world.engine.views.board.get("comes").record.state) == "starting"
    assert "waits for" not in both(client, "comes")[0]["text"]
    in_state(world, "holds", "stopping")
    in_state(world, "comes", "waiting")
    listed, alone = both(client, "comes")
    assert listed == alone
    assert listed["text"].endswith("; waits for 'holds' to leave")
    assert listed["jobs"] == ["holds"]
    in_state(world, "holds", "ended")
    listed, alone = both(client, "comes")
    assert listed == alone
    assert listed["text"].endswith("; waits for its GPUs to become free")


def test_every_row_is_explained_and_no_other(world, client):
    for name in ("a", "b", "c"):
        world.submit(name, max_gpus=1)
    first = client.get("/v1/jobs?limit=2").json()
    assert list(first["explanations"]) == [job["id"] for job in first["jobs"]] == ["a", "b"]
    rest = client.get("/v1/jobs?limit=2&after=b").json()
    assert list(rest["explanations"]) == ["c"]
    assert client.get("/v1/jobs?state=paused").json() == {"jobs": [], "explanations": {}, "next": None}


def test_what_the_backend_has_is_looked_up_once_for_a_page(world, client, monkeypatch):
    for name in ("a", "b", "c"):
        world.submit(name, max_gpus=1)
    asked: list[int] = []
    running = world.backend.running

    def counted():
        asked.append(1)
        return running()

    monkeypatch.setattr(world.backend, "running", counted)
    states = {job["state"] for job in client.get("/v1/jobs").json()["jobs"]}
    assert states == {"starting"}
    assert len(asked) == 1


def test_before_the_first_decision_its_detail_is_told_if_there_is_one(world):
    world.submit("a", max_gpus=1)
    record = replace(world.engine.views.board.get("a").record, reason=None, reason_at=None, detail="")
    entry = JobEntry(record, {}, None, None)
    assert explanation_of(entry, "", ()).text == "no decision was made about it yet"
    entry = JobEntry(replace(record, detail="its folder is gone"), {}, None, None)
    assert explanation_of(entry, "", ()).text == "its folder is gone"


def test_who_is_named_and_has_no_page_is_no_link(world):
    world.submit("a", max_gpus=1)
    found = explanation_of(world.engine.views.board.get("a"), "waits for 'x', 'a' to leave", {"a"})
    assert found.jobs == ("a",)
