"""The text format of Prometheus, version 0.0.4; `metrics` has the numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["CONTENT_TYPE", "Family", "text_of"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""The content type of the text."""


@dataclass(slots=True)
class Family:
    """All values of one name; `about` is one sentence. A counter only grows, and its name ends in `_total`."""

    name: str
    kind: Literal["gauge", "counter"]
    about: str
    samples: list[tuple[Mapping[str, str], float]] = field(default_factory=list)

    def add(self, value: float | None, **labels: str) -> None:
        """Add a value; None and NaN are left out."""
        if value is not None and not math.isnan(value):
            self.samples.append((labels, float(value)))


def text_of(families: Iterable[Family]) -> bytes:
    """The whole text; families without a value are left out."""
    lines: list[str] = []
    for family in families:
        if family.samples:
            lines.append(f"# HELP {family.name} {_escaped(family.about)}")
            lines.append(f"# TYPE {family.name} {family.kind}")
            lines += [f"{family.name}{_labels(labels)} {_number(value)}" for labels, value in family.samples]
    return ("\n".join(lines) + "\n").encode()


def _labels(labels: Mapping[str, str]) -> str:
    inside = ",".join(f'{name}="{_escaped(value, quote=True)}"' for name, value in labels.items())
    return f"{{{inside}}}" if inside else ""


def _escaped(text: str, quote: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quote else text


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)
