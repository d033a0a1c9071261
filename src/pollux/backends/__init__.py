"""Where replicas run: adapters behind one protocol."""

from __future__ import annotations

__all__: list[str] = []
