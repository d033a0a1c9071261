"""A Ray cluster that wants a token: who has none, or another, is told what to do, and who has it is let in."""

import pytest
from tests.integration.ray.conftest import Cluster, wait
from tests.integration.ray.runs import backend_at
from tests.integration.ray.test_service import Service
from tests.integration.ray.test_sharing import At

TOKEN = "0123456789abcdef" * 4
# Ray tries for so long, and then says only that it failed to connect.
RAY_SECONDS = 20.0
REMEDY = "start the service with RAY_AUTH_MODE=token and with the cluster's token in RAY_AUTH_TOKEN"


def shown(monkeypatch, **variables):
    """Show Ray a token from now on, or none."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(f"RAY_AUTH_{name}", value)


@pytest.fixture
def guarded(monkeypatch, tmp_path):
    # Ray looks for a token in the home folder, too.
    monkeypatch.setenv("HOME", str(tmp_path))
    shown(monkeypatch, MODE="token", TOKEN=TOKEN)
    made = Cluster(nodes=1, gpus=2)
    yield made
    made.end()


def warning(cluster, folder):
    """What a backend says that is not let in, sooner than Ray itself gives up."""
    backend = backend_at(folder, cluster.address, "guarded", warm=False)
    backend.start(lambda event: None)
    try:
        (said,) = wait("warning", backend.warnings, RAY_SECONDS)
        assert backend.inventory() == ()
        return said
    finally:
        backend.close()


def test_a_cluster_that_wants_a_token_says_so_and_lets_in_who_has_it(guarded, tmp_path, monkeypatch):
    shown(monkeypatch)
    service = Service(tmp_path / "home", guarded)
    try:
        (said,) = wait("warning", lambda: service.call("/v1/status")["warnings"], RAY_SECONDS)
        assert said.startswith("Ray cannot be reached (it wants an authentication token, and none is shown ")
        assert REMEDY in said
        assert "Traceback" not in service.log()
    finally:
        service.pollux("down")

    shown(monkeypatch, MODE="token")
    said = warning(guarded, tmp_path / "none")
    assert "no authentication token was found): start the service with " in said
    shown(monkeypatch, MODE="token", TOKEN="f" * 64)
    said = warning(guarded, tmp_path / "wrong")
    assert said.startswith("Ray cannot be reached (it does not know the authentication token that it was shown): ")
    assert REMEDY in said

    shown(monkeypatch, MODE="token", TOKEN=TOKEN)
    let_in = At(guarded, tmp_path / "right", "guarded", nodes=1)
    try:
        let_in.submit("job", {let_in.backend.inventory()[0].id: 2}, "print('done')")
        assert let_in.end("job").outcome == "succeeded"
        assert not let_in.backend.warnings()
    finally:
        let_in.close()
