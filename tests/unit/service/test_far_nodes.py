"""What agents on other machines are told: an address that leads to the service from there, and whom to trust."""

import asyncio
import socket
import ssl
from pathlib import Path

import pytest

from pollux import policies
from pollux.agent.distributed.environment import read_environment
from pollux.agent.reporting.report_client import Address, _trusting
from pollux.backends.fleet.backend import FleetBackend
from pollux.backends.nodes.provider import LentNode, PooledNodeProvider
from pollux.backends.protocol import Launch
from pollux.core import Node, Placement
from pollux.core.errors import InvalidInput
from pollux.service import ServiceSettings, Tokens
from pollux.service.engine.executor import Executor
from pollux.service.http.middleware import Guard
from pollux.service.server.certificates import host_for_nodes, trusted_text
from pollux.service.server.serve import _addressed, _for_nodes, listen
from pollux.testing.servers.service import FakeBackend, ManualClock

TLS = Path(__file__).parent / "tls"
HERE = (TLS / "localhost.pem", TLS / "localhost.key")
ELSEWHERE = (TLS / "elsewhere.pem", TLS / "elsewhere.key")


@pytest.fixture
def lender():
    return PooledNodeProvider()


@pytest.fixture
def fleet(tmp_path, lender):
    return FleetBackend(tmp_path / "home", lender, head="10.0.0.5", warm=False)


def settled(tmp_path, backend, host, **more):
    settings = ServiceSettings(home=tmp_path, host=host, insecure_bind=True, **more)
    with listen(host, 0) as found:
        port = found.getsockname()[1]
        return _for_nodes(_addressed(settings, found), backend), port


def test_a_service_at_all_addresses_is_reached_at_the_backends_head(tmp_path, fleet):
    settings, port = settled(tmp_path, fleet, "0.0.0.0")
    assert settings.url == f"http://127.0.0.1:{port}"
    assert settings.agents_url == f"http://10.0.0.5:{port}"
    assert {"10.0.0.5", socket.gethostname()} <= set(settings.allowed_hosts)


def test_a_service_at_one_address_is_reached_there(tmp_path, fleet):
    settings, port = settled(tmp_path, fleet, "127.0.0.2")
    assert settings.agents_url is None
    assert settings.url == f"http://127.0.0.2:{port}"


def test_a_backend_of_this_machine_needs_no_more(tmp_path):
    local = FakeBackend([Node("here", 1, "cpu")], ManualClock(0.0))
    assert settled(tmp_path, local, "0.0.0.0")[0].agents_url is None


def test_nodes_are_given_the_certificate_itself(tmp_path, fleet):
    settings, port = settled(tmp_path, fleet, "0.0.0.0", tls_cert=ELSEWHERE[0], tls_key=ELSEWHERE[1])
    assert settings.agents_url == f"https://pollux.invalid:{port}"
    assert settings.agents_ca == trusted_text(ELSEWHERE[0])


@pytest.fixture(autouse=True)
def names(monkeypatch):
    """Here the name of the other certificate leads to this machine too."""
    asked = socket.getaddrinfo
    known = {"pollux.invalid": [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]}
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *rest, **more: known.get(host) or asked(host, *rest, **more)
    )


def test_a_certificate_for_this_machine_only_is_refused():
    assert host_for_nodes(*ELSEWHERE, "10.0.0.5") == "pollux.invalid"
    with pytest.raises(InvalidInput, match=r"valid for localhost.* reach this machine at 10\.0\.0\.5.*head="):
        host_for_nodes(*HERE, "10.0.0.5")


def test_no_key_goes_with_the_certificate(tmp_path):
    both = tmp_path / "both.pem"
    both.write_text(HERE[1].read_text() + HERE[0].read_text())
    text = trusted_text(both)
    assert "PRIVATE" not in text
    context = _trusting(Address("https://localhost", "job", "token", ca=text))
    assert context.cert_store_stats()["x509"] == ssl.create_default_context().cert_store_stats()["x509"] + 1


def test_replicas_get_them(tmp_path, make_world):
    world = make_world()
    record = world.engine.pipeline.controller.jobs[world.submit("job")]
    launches: list[Launch] = []
    world.backend.submit = launches.append

    def launch(**more):
        settings = ServiceSettings(home=tmp_path, **more)
        executor = Executor(world.backend, settings, Tokens.random(), policies.create("pollux").batch, print)
        executor.start(record, 2, Placement.of({"node-0": 1}))
        return read_environment(launches[-1].env)

    near = launch(url="https://localhost:1")
    assert (near.url, near.ca, near.ca_file) == ("https://localhost:1", "", tmp_path / "ca.pem")
    far = launch(url="https://localhost:1", agents_url="https://head:1", agents_ca="PEM")
    assert (far.url, far.ca, far.ca_file) == ("https://head:1", "PEM", None)


def test_nodes_that_cannot_report_are_named(fleet, lender):
    lender.offer([LentNode(Node("n1", 1, "cpu"), ("10.0.0.7", 1)), LentNode(Node("n2", 1, "cpu"), ("10.0.0.8", 1))])
    fleet.reports_go_to("http://10.0.0.5:1")
    assert fleet.warnings() == ()
    fleet.reports_go_to("http://127.0.0.1:1")
    (said,) = fleet.warnings()
    for phrase in ("'n1' (10.0.0.7) and 1 more", "http://127.0.0.1:1", "--host 10.0.0.5", "--insecure-bind"):
        assert phrase in said
    lender.offer([LentNode(Node("n1", 1, "cpu"), ("127.0.0.1", 1)), LentNode(Node("n2", 1), ("10.0.0.5", 1))])
    assert fleet.warnings() == ()


@pytest.mark.parametrize(
    ("host", "server", "status"),
    [
        ("10.0.0.5:7341", "10.0.0.5", 200),
        ("10.0.0.5", "::ffff:10.0.0.5", 200),
        ("[fd00::2]:7341", "fd00:0:0::2", 200),
        ("box.example:7341", "10.0.0.5", 200),
        ("10.0.0.6:7341", "10.0.0.5", 403),
        ("evil.example", "10.0.0.5", 403),
        ("", "10.0.0.5", 403),
        ("evil.example", None, 403),
    ],
)
def test_requests_are_answered_at_the_address_they_came_to(host, server, status):
    seen = []

    async def app(scope, receive, send):
        seen.append(200)

    async def send(message):
        seen.append(message.get("status"))

    guard = Guard(app, Tokens.random(), ["box.example"])
    scope = {
        "type": "http",
        "method": "GET",
        "path": "/healthz",
        "headers": [(b"host", host.encode())],
        "server": None if server is None else (server, 7341),
    }
    asyncio.run(guard(scope, None, send))
    assert seen[0] == status
