"""The settings of a service, checked once; options of the command line become these."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pollux.backends.process.network import is_loopback
from pollux.core.errors import InvalidInput, UnknownName

__all__ = ["ANY_ADDRESS", "DEFAULT_PORT", "AtStop", "ServiceSettings"]

ANY_ADDRESS = ("0.0.0.0", "::")
"""Addresses to listen on that stand for all addresses of the machine; clients cannot use them."""

DEFAULT_PORT = 7341
"""The default port of the service; 0 stands for any free port."""

AtStop = Literal["stop", "keep"]
"""The choices for running jobs when the service stops: `stop` ends them with grace, and they go on at the next start;
`keep` leaves them running."""


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """All settings of a service. `home` holds the store, the token and the logs.

    `store` `memory` keeps nothing over a restart. `url` is where agents report; None: they report nowhere (an engine
    without HTTP), `serve` fills it in. `agents_url` is another for agents on nodes that reach this machine by another
    address, and `agents_ca` the certificate, as PEM text, that they trust there; None: as on this machine.
    `allowed_hosts` are further names under which the service may be addressed.
    Once a decision has taken `long_decision_seconds` of processor time, the policy gets a process of its own.
    `resize_seconds` is what a re-allocation is expected to cost a job until it has measured its own; None: as the
    backend estimates it.
    Times are in seconds.
    """

    home: Path
    policy: str = "castor"
    policy_options: Mapping[str, Any] = field(default_factory=dict)
    backend: str = "local"
    backend_options: Mapping[str, Any] = field(default_factory=dict)
    trigger: Literal["rounds", "events"] = "events"
    interval_seconds: float = 60.0
    min_gap_seconds: float = 2.0
    seed: int = 0
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    tls_cert: Path | None = None
    tls_key: Path | None = None
    insecure_bind: bool = False
    allowed_hosts: tuple[str, ...] = ()
    store: Literal["sqlite", "memory"] = "sqlite"
    at_stop: AtStop = "stop"
    report_every_seconds: float = 30.0
    resize_seconds: float | None = None
    long_decision_seconds: float = math.inf
    snapshot_every_facts: int = 1000
    snapshot_every_seconds: float = 600.0
    keep_facts_seconds: float = 90 * 86400.0
    url: str | None = None
    agents_url: str | None = None
    agents_ca: str | None = None

    def __post_init__(self) -> None:
        for name, known in (
            ("trigger", ("rounds", "events")),
            ("store", ("sqlite", "memory")),
            ("at_stop", ("stop", "keep")),
        ):
            if getattr(self, name) not in known:
                raise UnknownName(name, str(getattr(self, name)), known)
        if not 0 <= self.port <= 65535:
            raise InvalidInput(f"port is {self.port}; give 1 to 65535, or 0 for any free one")
        for name in ("interval_seconds", "min_gap_seconds", "report_every_seconds", "resize_seconds"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise InvalidInput(f"{name} is {value}; give a finite number of seconds above 0")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InvalidInput("TLS needs a certificate and its key; give both, or neither")

    def check_bind(self) -> None:
        """Refuse an address that other machines can reach, unless traffic is encrypted or the user accepts that."""
        if is_loopback(self.host) or self.tls_cert is not None or self.insecure_bind:
            return
        raise InvalidInput(
            f"address {self.host} can be reached from other machines, and tokens would travel in clear text; "
            "give --tls-cert and --tls-key, or --insecure-bind if you accept that"
        )
