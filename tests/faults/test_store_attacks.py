"""A stranger at the store of a job that trains: nothing changes for the job, and the store says whom it refused."""

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.support import slow_until
from tests.support.live_supervisor import LiveSupervisor

from pollux.agent.distributed.authenticated_store import AuthenticatedStore
from pollux.testing.jobs.replica_server import load_module
from pollux.testing.waiting import PATIENCE_SECONDS, wait_until
from pollux.wire.live import keys

attacks = load_module(str(Path(__file__).with_name("store_attacks.py")))
INTEGRATION = Path(__file__).parents[1] / "integration"
SCRIPT = str(INTEGRATION / "agent" / "live_script.py")
LIVE = load_module(SCRIPT)
SERVICE = load_module(str(INTEGRATION / "local" / "test_live.py"))
SEED = int(os.environ.get("POLLUX_FAULT_SEED", "7"))
REFUSED = "the job's store refused"


@pytest.fixture
def job(replica_server, tmp_path):
    """Two replicas that train, slowly until they are finished."""
    supervisor = LiveSupervisor(
        replica_server, f"{SCRIPT}:train", {"folder": str(tmp_path)}, log=tmp_path / "store.log"
    )
    supervisor.start(2)
    supervisor._until(lambda: True if supervisor.step() >= 3 else None, "training goes on")
    yield supervisor
    supervisor.close()


def attacked(supervisor: LiveSupervisor, attack: Any, *arguments: Any) -> Any:
    port = supervisor.host.access.port
    assert port in attacks.as_stranger(attacks.listening_ports), "its port is no secret"
    return attacks.as_stranger(attack, port, *arguments)


@pytest.mark.parametrize(
    ("attack", "outcome", "said"),
    [
        (attacks.write_keys, "", "it uses PyTorch's own store" if attacks.IS_ROOT else ""),
        (attacks.join, [], "it left before it had proved itself"),
        (attacks.guess, "", "it does not know the job's secret"),
        (attacks.too_much, True, "it sent what no replica sends first"),
        (attacks.slow, "", "it had not proved itself after 5 s"),
        (attacks.idle, [True, 0], "too many connections have not proved themselves"),
    ],
)
def test_a_stranger_changes_nothing(job, tmp_path, attack, outcome, said):
    before = job._client.num_keys(), job._client.check([f"{keys.PREFIX}/{keys.COMMITTED}"])
    assert attacked(job, attack) == outcome
    step = job.step()
    job._until(lambda: True if job.step() > step else None, "training goes on")
    after = job._client.num_keys(), job._client.check([f"{keys.PREFIX}/{keys.COMMITTED}"])
    assert after == before
    log = (tmp_path / "store.log").read_text()
    assert (f"{REFUSED} 127.0.0.1:" in log and said in log) or not said, log
    assert len(log) < 5000
    LIVE.check_exact(LIVE.finish(job, tmp_path))


def test_the_log_names_the_user(job, tmp_path):
    if attacks.IS_ROOT:
        attacked(job, attacks.write_keys)
        assert f"(user {attacks.NOBODY})" in (tmp_path / "store.log").read_text()


def test_what_a_replica_said_means_nothing_in_another_mouth(job, tmp_path):
    said = attacks.recorded(job.host.access)
    assert attacked(job, attacks.replay, said)
    assert job._client.get("counted") == b"1"
    assert "it does not know the job's secret" in (tmp_path / "store.log").read_text()
    LIVE.check_exact(LIVE.finish(job, tmp_path))


def test_random_bytes_change_nothing(job, tmp_path):
    before = job._client.num_keys()
    assert attacked(job, attacks.fuzz, SEED)
    assert job._client.num_keys() == before
    log = (tmp_path / "store.log").read_text()
    assert REFUSED in log
    assert len(log) < 20_000
    LIVE.check_exact(LIVE.finish(job, tmp_path))


def test_a_crowd_of_strangers_keeps_no_replica_out(job, tmp_path):
    """The job grows, with new connections, while a thousand others say nothing."""
    crowd = threading.Thread(target=attacked, args=(job, attacks.idle))
    crowd.start()
    assert job.resize(3) == "done", job.outputs()
    AuthenticatedStore(job.host.access, PATIENCE_SECONDS).close()
    crowd.join(PATIENCE_SECONDS)
    values = LIVE.finish(job, tmp_path)
    assert len(values) == 3
    LIVE.check_exact(values)


@pytest.fixture
def service(tmp_path):
    running = SERVICE.Service(tmp_path / "home")
    yield running
    running.pollux("down")


def test_a_job_of_the_service_is_as_safe(service):
    """The port that the machine shows to everybody, every attack at it, and a secret that it shows to nobody."""
    before = {*attacks.listening_ports()}
    attacked = service.home / "attacked"
    run = slow_until.command(attacked, SERVICE.SCRIPT, "--step-wait", "0.5", "--epochs", "6", "--copies", "1")
    asked = {"name": "digits", "run": run, "gpus": "2", "on_resize": "live", "workdir": str(service.home)}
    service.call("/v1/jobs", asked)
    service.until("a live agent", lambda job: job["state"] == "running" and job["resize_kind"] == "live")
    store = store_port(service.home)
    assert store in {*attacks.as_stranger(attacks.listening_ports)} - before
    assert "POLLUX_STORE_SECRET" not in attacks.as_stranger(readable)
    for attack in (attacks.write_keys, attacks.join, attacks.guess, attacks.too_much, attacks.idle):
        attacks.as_stranger(attack, store)
    assert attacks.as_stranger(attacks.fuzz, store, SEED)
    assert service.call("/v1/jobs/digits")["job"]["state"] == "running"
    # The folder of a job's run goes when the job has ended.
    log = (service.home / "run" / "digits" / "shim.log").read_text()
    assert REFUSED in log
    assert len(log) < 20_000
    attacked.touch()
    service.until("the end", lambda job: job["state"] == "succeeded")
    receipt = json.loads((service.home / "receipts" / "digits" / "receipt.json").read_text())
    assert {entry["samples"] for entry in receipt["ledger"]} == {1437}
    assert len({entry["hash"] for entry in receipt["ledger"]}) == 1
    assert receipt["exact"]
    assert service.call("/v1/jobs/digits")["job"]["crashes"] == 0


def store_port(home: Path) -> int:
    """Where the store listens that the job's shim hosts."""
    shim = json.loads((home / "run" / "digits" / "shim.json").read_text())["pid"]

    def found() -> int | None:
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                name, parent = (folder / "stat").read_text().rpartition(")")[::2]
                if not name.endswith("(pollux-store") or int(parent.split()[1]) != shim:
                    continue
                files = {os.readlink(file) for file in (folder / "fd").iterdir()}
            except OSError:
                continue
            for inode, port in attacks.listeners().items():
                if f"socket:[{inode}]" in files:
                    return int(port)
        return None

    return int(wait_until("the store's host", found, PATIENCE_SECONDS, 0.1) or 0)


def readable() -> str:
    """All command lines, and of other users' processes all variables, as far as they can be read."""
    told = []
    for file in [
        *Path("/proc").glob("[0-9]*/cmdline"),
        *(Path("/proc").glob("[0-9]*/environ") if attacks.IS_ROOT else ()),
    ]:
        try:
            told.append(file.read_bytes().decode(errors="replace"))
        except OSError:
            continue
    return "\n".join(told)
