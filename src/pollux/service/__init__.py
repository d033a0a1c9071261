"""The real-clock driver of the controller: engine, REST API, authentication. `serve` starts them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pollux.service.auth.tokens import Tokens
from pollux.service.engine.engine import Engine
from pollux.service.settings import DEFAULT_PORT, ServiceSettings
from pollux.service.settings.clock import Clock, SystemClock

if TYPE_CHECKING:
    from pollux.service.server.app import create_app
    from pollux.service.server.serve import serve

__all__ = ["DEFAULT_PORT", "Clock", "Engine", "ServiceSettings", "SystemClock", "Tokens", "create_app", "serve"]


def __getattr__(name: str) -> Any:
    # An engine alone, as in `pollux run`, needs no web framework.
    if name == "create_app":
        from pollux.service.server.app import create_app

        return create_app
    if name == "serve":
        from pollux.service.server.serve import serve

        return serve
    raise AttributeError(f"module 'pollux.service' has no attribute '{name}'")
