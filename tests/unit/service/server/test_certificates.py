"""Which name a service with a certificate goes by. The keys in `tls` are thrown away; they open nothing."""

import socket
from pathlib import Path

import pytest

from pollux.core.errors import InvalidInput
from pollux.service import ServiceSettings
from pollux.service.server.certificates import host_to_announce, names_of
from pollux.service.server.serve import listen, url_of

TLS = Path(__file__).parents[1] / "tls"
HERE = (TLS / "localhost.pem", TLS / "localhost.key")
ELSEWHERE = (TLS / "elsewhere.pem", TLS / "elsewhere.key")


def test_the_names_that_it_is_made_out_to():
    assert names_of(*HERE) == ("localhost",)
    assert names_of(*ELSEWHERE) == ("pollux.invalid",)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_a_name_is_announced_that_clients_accept(tmp_path, monkeypatch, host):
    # A machine may know no `localhost`, or only that of IPv6.
    asked = socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda name, *rest, **more: asked({"localhost": "127.0.0.1"}.get(name, name), *rest, **more),
    )
    settings = ServiceSettings(home=tmp_path, host=host, tls_cert=HERE[0], tls_key=HERE[1])
    with listen(host, 0) as found:
        assert url_of(settings, found) == f"https://localhost:{found.getsockname()[1]}"


def test_a_name_that_leads_elsewhere_is_not_announced():
    """The certificate is for `localhost`, but the service listens at another address only."""
    with pytest.raises(InvalidInput, match=r"valid for localhost.*--host"):
        host_to_announce(*HERE, "192.0.2.1", "192.0.2.1")


def test_the_only_valid_name_is_taken_where_it_leads_here(monkeypatch):
    asked = socket.getaddrinfo
    names = {"pollux.invalid": [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]}
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *rest, **more: names.get(host) or asked(host, *rest, **more)
    )
    assert host_to_announce(*ELSEWHERE, "127.0.0.1", "127.0.0.1") == "pollux.invalid"


def test_a_certificate_that_nobody_would_trust_is_refused():
    with pytest.raises(InvalidInput, match=r"cannot be verified.*--tls-cert"):
        names_of(HERE[0], ELSEWHERE[1])
