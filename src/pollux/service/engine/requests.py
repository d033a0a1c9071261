"""Requests to the engine's thread, and the combined effects of several of them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from pollux.controller import Command, Controller, Event
from pollux.core.errors import PolluxError
from pollux.store.protocol import TelemetryRow

__all__ = ["Batch", "Effects", "EngineRequest", "our_fault"]


@dataclass(frozen=True, slots=True)
class Effects:
    """The effects of a request: an event for the controller, rows for the telemetry, or neither."""

    event: Event | None = None
    rows: tuple[TelemetryRow, ...] = ()


@dataclass(slots=True)
class EngineRequest:
    """Something to be done in the engine's thread.

    `effects` is called with the time and may refuse; `reply` is called when everything is durable.
    """

    effects: Callable[[float], Effects]
    reply: Callable[[], Any]
    future: Future[Any] = field(default_factory=Future)


@dataclass(slots=True)
class Batch:
    """Requests that are written together: `accepted` were not refused, `reading` are accepted ones without effects."""

    events: list[Event] = field(default_factory=list)
    rows: list[TelemetryRow] = field(default_factory=list)
    commands: list[list[Command]] = field(default_factory=list)
    accepted: list[EngineRequest] = field(default_factory=list)
    reading: list[EngineRequest] = field(default_factory=list)

    def add(self, request: EngineRequest, controller: Controller, now: float) -> None:
        """Apply the effects of a request to the controller, or raise its refusal."""
        effects = request.effects(now)
        if effects.event is not None:
            self.commands.append(controller.apply(effects.event))
            self.events.append(effects.event)
        self.rows.extend(effects.rows)
        self.accepted.append(request)
        if effects.event is None and not effects.rows:
            self.reading.append(request)


def our_fault(error: Exception) -> PolluxError:
    """The error for a caller after a bug in Pollux."""
    return PolluxError(f"the service failed inside: {error!r}; its log has the details")
