"""A service whose job keeps its checkpoints in a store: refused where it cannot, and resumed from there alone."""

import json
import os
import shutil
import signal
import socket
import urllib.error

import pytest
from tests.integration.local.test_end_to_end import Service, pollux, replicas

from pollux.storage.object_store import ObjectStore
from pollux.testing.waiting import wait_until


@pytest.fixture(scope="module")
def service(s3, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stored")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        running = Service(folder / "home")
    yield running
    down = pollux(running.home, "down")
    assert down.returncode == 0, down.stderr
    assert replicas(running.home) == []


def refused(service, address, **more):
    with pytest.raises(urllib.error.HTTPError) as error:
        service.submit("refused", checkpoint={"dir": address}, **more)
    assert error.value.code == 422
    message = json.load(error.value)["error"]["message"]
    assert "refused" not in {job["id"] for job in service.call("/v1/jobs?limit=100")["jobs"]}
    return message


def test_a_bucket_that_is_not_there_is_refused_at_once(service):
    message = refused(service, "s3://no-such-bucket/run")
    assert message.startswith("checkpoint: dir: s3://no-such-bucket/run: its bucket does not exist")
    assert message.endswith("create it first")


def test_a_store_that_is_not_there_is_refused(service):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{closed.getsockname()[1]}"
        message = refused(service, "s3://bucket/run", env={"AWS_ENDPOINT_URL": nowhere, "AWS_MAX_ATTEMPTS": "1"})
    assert "s3://bucket/run" in message
    assert "check its address, the job's key and the network" in message


def test_a_job_goes_on_from_the_store_alone(service, bucket, tmp_path):
    store = ObjectStore(f"s3://{bucket}/run", tmp_path / "look")
    answer = service.submit(
        "train", "--epochs", "6", "--seed", "1", gpus="2", checkpoint={"dir": store.address, "every": "1s"}
    )
    assert answer["plan"]["starts_now"]
    wait_until("checkpoint", lambda: any(name.endswith("pollux.json") for name in store.sizes()))
    for name in replicas(service.home):
        os.kill(int(name.split("-")[0]), signal.SIGKILL)
    wait_until("end of the replicas", lambda: not replicas(service.home))
    cache = service.home.parent / "cache"
    assert cache.exists()
    shutil.rmtree(cache)
    (job,) = [job for job in service.wait("train").values() if job["id"] == "train"]
    assert job["state"] == "succeeded"
    (receipt,) = (service.home / "receipts" / "train").glob("*.json")
    events = json.loads(receipt.read_text())["events"]
    resumed = [event for event in events if event["kind"] == "resumed"]
    assert resumed
    assert resumed[0]["step"] > 0
    assert not (service.home / "checkpoints" / "train").exists()
