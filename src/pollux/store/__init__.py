"""The log of facts, its snapshots, and telemetry apart from it."""

from __future__ import annotations

__all__: list[str] = []
