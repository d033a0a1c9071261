"""What /readyz says of the backend."""

from starlette.testclient import TestClient

from pollux.service.server.app import create_app


def test_a_backend_that_fails_at_its_work_is_not_ready(world):
    client = TestClient(create_app(world.engine, world.tokens, ("testserver",), lambda jobs: None))
    assert client.get("/readyz").status_code == 200
    world.backend.healthy = False
    answer = client.get("/readyz")
    assert answer.status_code == 503
    assert "backend" in answer.json()["error"]["message"]
    assert client.get("/healthz").status_code == 200
