from __future__ import annotations

import json
from dataclasses import replace

import pytest
from starlette.testclient import TestClient

from pollux.core.errors import PolluxError, StoreFailed
from pollux.service import create_app
from pollux.service.server.app import operations
from pollux.testing.servers.service import SAMPLE_MODEL, result_of, sample_report
from pollux.wire.codec import encode


@pytest.fixture
def client(world):
    app = create_app(world.engine, world.tokens, ["pollux.example"])
    with TestClient(app, base_url="http://127.0.0.1:7341") as client:
        client.headers["authorization"] = f"Bearer {world.tokens.operator}"
        yield client


def job_file(world, **keys):
    return {"name": "a", "run": ["sleep", "1"], "gpus": "1..4", "workdir": str(world.home), **keys}


def code_of(response):
    error = response.json()["error"]
    assert set(error) == {"code", "message", "retryable"}
    return error["code"]


def test_a_job_from_submit_to_end(world, client):
    answer = client.post("/v1/jobs", json=job_file(world))
    assert answer.status_code == 201, answer.text
    assert answer.json()["job"]["id"] == "a"
    assert answer.json()["plan"]["starts_now"] is True
    world.after(3.0)
    world.backend.started("a")
    world.engine.loop.wait_until_idle()
    assert client.get("/v1/jobs/a").json()["job"]["state"] == "running"
    shown = client.get("/v1/jobs/a").json()
    assert shown["request"]["gpus"] == "1..4"
    assert [line["kind"] for line in shown["events"]] == ["submitted", "placed", "running"]
    assert client.get("/v1/jobs/a/explain").json()["text"]
    world.backend.log_text = "hello\nthere\n"
    assert client.get("/v1/jobs/a/logs?offset=-6").json() == {"text": "there\n", "offset": 12, "at_end": True}
    assert client.post("/v1/jobs/a/cancel").json()["job"]["state"] == "cancelled"
    again = client.post("/v1/jobs/a/cancel")
    assert (again.status_code, code_of(again)) == (409, "IllegalTransition")


def test_what_a_state_forbids_is_told_as_such(world, client):
    world.submit("a")
    world.after(3.0)
    told = [client.post("/v1/jobs/a/resume")]
    client.post("/v1/jobs/a/pause")
    told.append(client.post("/v1/jobs/a/pause"))
    client.post("/v1/jobs/a/cancel")
    told += [client.post(f"/v1/jobs/a/{verb}") for verb in ("cancel", "pause", "resume")]
    told.append(client.post("/v1/jobs/a/resize", json={"gpus": 2}))
    assert [(answer.status_code, code_of(answer)) for answer in told] == [(409, "IllegalTransition")] * 6


def test_listing_is_filtered_and_paged(world, client):
    for number in range(5):
        world.submit(f"j{number}", max_gpus=1, queue="q1" if number % 2 else "q0")
    result_of(world.engine.cancel("j0"))
    first = client.get("/v1/jobs?limit=2").json()
    assert ([job["id"] for job in first["jobs"]], first["next"]) == (["j0", "j1"], "j1")
    rest = client.get("/v1/jobs?limit=10&after=j1").json()
    assert ([job["id"] for job in rest["jobs"]], rest["next"]) == (["j2", "j3", "j4"], None)
    assert [job["id"] for job in client.get("/v1/jobs?queue=q1").json()["jobs"]] == ["j1", "j3"]
    assert [job["id"] for job in client.get("/v1/jobs?state=cancelled").json()["jobs"]] == ["j0"]
    assert len(client.get("/v1/jobs?active=true").json()["jobs"]) == 4
    assert len(client.get("/v1/jobs?active=false").json()["jobs"]) == 1
    listed = {job["id"]: job for job in client.get("/v1/jobs").json()["jobs"]}
    assert listed["j3"] == client.get("/v1/jobs/j3").json()["job"]


@pytest.mark.parametrize(
    "query",
    [
        "limit=0", "limit=1001", "limit=x", "limit=1e2", "limit=٣", "active=yes", "state=wild", "colour=red",
        "limit=1&limit=2",
    ],
)  # fmt: skip
def test_queries_are_read_strictly(client, query):
    answer = client.get(f"/v1/jobs?{query}")
    assert (answer.status_code, code_of(answer)) == (422, "InvalidInput")


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"", "JSON"),
        (b"[1,2", "JSON"),
        (b"\xff\xfe", "UTF-8"),
        (b"3", "job"),
        (b"[" * 100_000, "deep"),
        (b'{"run": "x", "run": "y"}', "twice"),
        (b'{"run": "sleep 1", "workdir": "/", "gpsu": 3}', "gpus"),
        (b'{"run": "sleep 1", "workdir": "relative"}', "workdir"),
        (b'{"run": "sleep 1", "workdir": "/no/such/folder"}', "does not exist"),
        (b'{"run": "no-such-command-anywhere", "workdir": "/"}', "no-such-command"),
        (b'{"run": "sleep 1", "workdir": "/", "name": "../../etc"}', "name"),
        (b'{"run": "sleep 1", "workdir": "/", "gpus": "9..3"}', "gpus"),
        (b'{"run": "sleep 1", "workdir": "/", "retries": NaN}', "NaN"),
    ],
)
def test_bodies_are_read_strictly(world, client, body, word):
    before = world.store.revision
    for path in ("/v1/jobs", "/v1/plan"):
        answer = client.post(path, content=body)
        assert answer.status_code == 422, answer.text
        assert word in answer.json()["error"]["message"]
    assert world.store.revision == before


def test_a_folder_that_is_not_there_has_a_code_of_its_own(world, client):
    for path in ("/v1/jobs", "/v1/plan"):
        answer = client.post(path, json=job_file(world, workdir="/no/such/folder"))
        assert (answer.status_code, code_of(answer)) == (422, "WorkdirMissing")


def test_too_large_is_refused(client):
    answer = client.post("/v1/jobs", content=b"x" * 1_048_577)
    assert (answer.status_code, code_of(answer)) == (413, "TooLarge")

    def pieces():
        for _ in range(20):
            yield b"x" * 100_000

    streamed = client.post("/v1/jobs", content=pieces())
    assert (streamed.status_code, code_of(streamed)) == (413, "TooLarge")


def test_without_a_token_nothing_but_health(world, client):
    del client.headers["authorization"]
    assert client.get("/healthz").json() == {"status": "ok"}
    assert client.get("/readyz").json() == {"status": "ok"}
    assert client.get("/docs").status_code == 200
    for operation in operations():
        if operation.open:
            continue
        path = operation.path.replace("{job_id}", "a").replace("{queue}", "q")
        for header in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {world.tokens.operator}"}):
            answer = client.request(operation.method, path, headers=header)
            assert (answer.status_code, code_of(answer)) == (401, "Unauthorised"), path
    assert client.get("/v1/nothing").status_code == 401


@pytest.mark.parametrize("generation", [0, 1])
def test_a_model_that_is_none_is_refused_of_earlier_replicas_too(world, client, generation):
    world.submit("a", max_gpus=1)
    body = encode(sample_report(generation, model=replace(SAMPLE_MODEL, max_batch=1)))
    answer = client.post("/v1/jobs/a/reports", json=body)
    assert (answer.status_code, code_of(answer)) == (422, "InvalidInput")
    assert client.post("/v1/jobs/a/reports", json=encode(sample_report(generation))).status_code == 200


def test_a_jobs_token_reports_and_reads_its_own_job_only(world, client):
    world.submit("a", max_gpus=1)
    world.submit("b", max_gpus=1)
    client.headers["authorization"] = f"Bearer {world.tokens.for_job('a')}"
    body = encode(sample_report(1, model=SAMPLE_MODEL))
    assert client.post("/v1/jobs/a/reports", json=body).json()["report_every_seconds"] == 30.0
    assert client.get("/v1/jobs/a").status_code == 200
    allowed = {("GET", "/v1/jobs/{job_id}"), ("POST", "/v1/jobs/{job_id}/reports")}
    for operation in operations():
        if operation.open:
            continue
        path = operation.path.replace("{queue}", "q")
        for job_id in ("a", "b"):
            if job_id == "a" and (operation.method, operation.path) in allowed:
                continue
            answer = client.request(operation.method, path.replace("{job_id}", job_id), content=b"{}")
            assert (answer.status_code, code_of(answer)) == (403, "Forbidden"), path
    forged = world.tokens.for_job("a").replace(".a.", ".b.")
    assert client.get("/v1/jobs/b", headers={"authorization": f"Bearer {forged}"}).status_code == 401


def test_foreign_host_names_are_refused(client):
    for host in ("evil.example", "evil.example:7341", "", "127.0.0.1.evil.example"):
        answer = client.get("/healthz", headers={"host": host})
        assert (answer.status_code, code_of(answer)) == (403, "Forbidden"), host
    for host in ("localhost:7341", "127.0.0.1", "[::1]:7341", "[::1]", "pollux.example:80"):
        assert client.get("/healthz", headers={"host": host}).status_code == 200, host


def test_unknown_paths_and_methods_have_the_same_shape(client):
    missing = client.get("/v1/nothing")
    assert (missing.status_code, code_of(missing)) == (404, "UnknownName")
    wrong = client.delete("/v1/jobs")
    assert (wrong.status_code, code_of(wrong)) == (405, "MethodNotAllowed")
    assert {"GET", "POST"} <= set(wrong.headers["allow"].split(", "))
    unknown = client.get("/v1/jobs/nobody")
    assert (unknown.status_code, code_of(unknown)) == (404, "UnknownName")


def test_queues_policies_cluster_and_status(client):
    set_to = client.put("/v1/queues/vision", json={"weight": 2, "gpu_quota": 3})
    assert set_to.json() == {"name": "vision", "weight": 2.0, "gpu_quota": 3, "used": 0, "jobs": 0}
    assert [queue["name"] for queue in client.get("/v1/queues").json()["queues"]] == ["vision"]
    bodies: list[object] = [{}, {"weight": 0}, {"weight": True}, {"weight": 1, "x": 2}, {"gpu_quota": -1}, []]
    for bad in bodies:
        assert client.put("/v1/queues/vision", json=bad).status_code == 422, bad
    assert client.put("/v1/queues/Not A Queue", json={"weight": 1}).status_code == 422
    policies = {each["name"]: each["runs_here"] for each in client.get("/v1/policies").json()["policies"]}
    assert policies["pollux"] is True
    assert policies["optimus-oracle"] is False
    assert client.get("/v1/cluster").json()["nodes"][0]["gpus"] == 4
    status = client.get("/v1/status").json()
    assert (status["policy"], status["backend"]) == ("pollux", "fake")


def test_a_queue_keeps_what_is_not_given(client):
    client.put("/v1/queues/vision", json={"weight": 2, "gpu_quota": 3})
    assert client.put("/v1/queues/vision", json={"weight": 4}).json()["gpu_quota"] == 3
    assert client.put("/v1/queues/vision", json={"gpu_quota": None}).json()["weight"] == 4.0
    assert client.get("/v1/queues").json()["queues"][0]["gpu_quota"] is None


def test_a_key_that_is_not_known_is_named_with_the_closest(world, client):
    world.submit("a")
    asked: list[tuple[str, str, dict[str, object], str]] = [
        ("PUT", "/v1/queues/vision", {"wieght": 2}, "unknown key 'wieght' in the body: did you mean 'weight'?"),
        ("POST", "/v1/jobs/a/resize", {"gpu": 2}, "unknown key 'gpu' in the body: did you mean 'gpus'?"),
        ("POST", "/v1/shutdown", {"job": "keep"}, "unknown key 'job' in the body: did you mean 'jobs'?"),
        ("POST", "/v1/shutdown", {"jobs": "leave"}, "jobs is leave"),
    ]
    for method, path, body, said in asked:
        answer = client.request(method, path, json=body)
        assert answer.status_code == 422
        assert said in answer.json()["error"]["message"], answer.text


def test_a_queue_that_nobody_set_up_is_noted_in_the_plan(world, client):
    client.put("/v1/queues/vision", json={"weight": 2})
    for path, plan in (("/v1/plan", lambda body: body), ("/v1/jobs", lambda body: body["plan"])):
        note = plan(client.post(path, json=job_file(world, queue="vison")).json())["note"]
        assert note == "queue 'vison' is new: weight 1, no quota; did you mean 'vision'? known: default, vision"
    for queue in ("default", "vision", "vison"):
        assert client.post("/v1/plan", json=job_file(world, name="b", queue=queue)).json()["note"] == ""


def test_more_gpus_than_there_are_are_taken_and_told(world, client):
    world.submit("a")
    told = client.post("/v1/jobs/a/resize", json={"gpus": 9}).json()
    assert told["job"]["min_gpus"] == 9
    assert "needs 9 GPUs" in told["note"]
    assert client.post("/v1/jobs/a/resize", json={"gpus": "1..9"}).json()["note"] == ""


def test_a_rigid_job_that_runs_is_said_not_to_move(world, client):
    client.post("/v1/jobs", json=job_file(world, gpus=2))
    world.after(3.0)
    world.backend.started("a")
    world.engine.loop.wait_until_idle()
    told = client.post("/v1/jobs/a/resize", json={"gpus": "1..4"}).json()
    assert (told["job"]["gpus"], told["job"]["max_gpus"]) == (2, 4)
    assert told["note"] == (
        "it is rigid and keeps its 2 GPUs as long as it runs; the new limits count from its next start, "
        "as after 'pollux pause a' and 'pollux resume a'"
    )
    assert client.post("/v1/jobs/a/resize", json={"gpus": 2}).json()["note"] == ""
    client.post("/v1/jobs/a/resize", json={"gpus": 3})
    client.post("/v1/jobs/a/pause")
    world.backend.ended("a", "stopped", "")
    world.engine.loop.wait_until_idle()
    assert client.post("/v1/jobs/a/resize", json={"gpus": 3}).json()["note"] == ""
    client.post("/v1/jobs/a/resume")
    world.after(30.0)
    assert client.get("/v1/jobs/a").json()["job"]["gpus"] == 3


def test_figures_from_before_the_last_start_are_marked(world, client):
    world.submit("a")
    world.backend.started("a")
    world.engine.loop.wait_until_idle()
    result_of(world.engine.report("a", sample_report(generation=1)))
    shown = client.get("/v1/jobs/a").json()["job"]
    assert (shown["outdated"], shown["progress"] is None) == (False, False)
    world.after(5.0)
    world.backend.ended("a", "lost", "the machine restarted")
    world.engine.loop.wait_until_idle()
    world.after(30.0)
    shown = client.get("/v1/jobs/a").json()
    assert (shown["job"]["gpus"] > 0, shown["job"]["generation"] > 1, shown["job"]["outdated"]) == (True, True, True)
    assert "generation 1 lost: the machine restarted" in [line["text"] for line in shown["events"]]
    result_of(world.engine.report("a", sample_report(generation=shown["job"]["generation"])))
    assert client.get("/v1/jobs/a").json()["job"]["outdated"] is False


def test_resizing_takes_one_key(world, client):
    world.submit("a")
    assert client.post("/v1/jobs/a/resize", json={"gpus": "2..3"}).json()["job"]["max_gpus"] == 3
    bodies: list[object] = [{}, {"gpus": "0..3"}, {"gpus": 2, "x": 1}, [], {"gpus": "3..2"}]
    for bad in bodies:
        assert client.post("/v1/jobs/a/resize", json=bad).status_code == 422, bad


def test_a_name_in_use_is_a_conflict(world, client):
    assert client.post("/v1/jobs", json=job_file(world)).status_code == 201
    refused = client.post("/v1/jobs", json=job_file(world))
    assert refused.status_code == 409
    assert "another name" in refused.json()["error"]["message"]


def test_a_full_disk_has_a_code_of_its_own_and_changes_nothing(world, client, monkeypatch):
    def full(events):
        raise StoreFailed("no room in /somewhere: free some")

    monkeypatch.setattr(world.store, "append", full)
    refused = client.post("/v1/jobs", json=job_file(world))
    assert refused.status_code == 507
    assert "free some" in refused.json()["error"]["message"]
    assert client.get("/v1/jobs").json()["jobs"] == []
    monkeypatch.undo()
    assert client.post("/v1/jobs", json=job_file(world)).status_code == 201


def test_the_same_key_gives_the_same_job(world, client):
    header = {"idempotency-key": "abc"}
    first = client.post("/v1/jobs", json=job_file(world), headers=header)
    again = client.post("/v1/jobs", json=job_file(world), headers=header)
    assert first.status_code == again.status_code == 201
    assert first.json()["job"]["id"] == again.json()["job"]["id"]
    assert client.post("/v1/jobs", json=job_file(world, name="b"), headers=header).status_code == 409
    assert client.post("/v1/jobs", json=job_file(world), headers={"idempotency-key": "x" * 129}).status_code == 422


def messages(text):
    found = []
    for part in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in part.splitlines() if not line.startswith(":"))
        if "data" in fields:
            found.append((int(fields["id"]), fields["event"], json.loads(fields["data"])))
    return found


def test_the_stream_resumes_where_it_was(world, client):
    world.submit("a")
    seen = messages(client.get("/v1/events?follow=false", headers={"last-event-id": "0"}).text)
    assert [number for number, _, _ in seen] == list(range(1, world.store.revision + 1))
    assert [kind for _, kind, _ in seen][:3] == ["node-added", "decision", "submitted"]
    middle = seen[1][0]
    rest = messages(client.get("/v1/events?follow=false", headers={"last-event-id": str(middle)}).text)
    assert rest == seen[2:]
    assert messages(client.get("/v1/events?follow=false").text) == []
    assert client.get("/v1/events", headers={"last-event-id": "x"}).status_code == 422


def test_a_series_is_thinned(world, client):
    world.submit("a", max_gpus=1)
    for step in range(20):
        result_of(world.engine.report("a", sample_report(1, progress=step)))
        world.after(1.0)
    rows = client.get("/v1/jobs/a/series?limit=5").json()["rows"]
    assert 1 <= len(rows) <= 5
    assert rows[-1]["values"]["progress"] == 19
    assert client.get("/v1/jobs/a/series?kind=wild").status_code == 422


def test_a_mistake_of_ours_is_told_in_the_same_shape(world, client, monkeypatch, caplog):
    def broken(*_):
        raise RuntimeError("secret insides")

    monkeypatch.setattr(world.engine.views.etas, "overall", broken)
    answer = client.get("/v1/eta")
    assert (answer.status_code, code_of(answer)) == (500, "PolluxError")
    assert "secret" not in answer.text
    assert "secret insides" in caplog.text


def test_every_error_has_a_status_that_is_described():
    described = {code for operation in operations() for code in operation.errors} | {
        401,
        403,
        405,
        413,
        422,
        500,
        503,
        507,
    }

    def classes(kind):
        return {kind, *(found for child in kind.__subclasses__() for found in classes(child))}

    assert {kind.http_status for kind in classes(PolluxError)} <= described
