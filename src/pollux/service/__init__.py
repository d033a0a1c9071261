"""The real-clock driver of the controller: runner, REST API, authentication."""

from __future__ import annotations

__all__: list[str] = []
