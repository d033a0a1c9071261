"""How option values are read: a value that cannot be used is named, with what would be right."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import typer

from pollux.core import UnknownName

__all__ = ["real", "trigger", "whole"]


def whole(minimum: int) -> Callable[[str], int]:
    """A reader of whole numbers from `minimum` on."""

    def parse(value: str) -> int:
        try:
            number = int(value)
        except ValueError:
            number = minimum - 1
        if number < minimum:
            raise typer.BadParameter(f"'{value}': give a whole number, {minimum} or more")
        return number

    return parse


def real(allowed: Callable[[float], bool] = math.isfinite, remedy: str = "") -> Callable[[str], float]:
    """A reader of finite numbers that are `allowed`; `remedy` says which those are."""

    def parse(value: str) -> float:
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not (math.isfinite(number) and allowed(number)):
            raise typer.BadParameter(f"'{value}': give a finite number{remedy and ', '}{remedy}")
        return number

    return parse


def trigger(value: str) -> Literal["rounds", "events"]:
    """Read `rounds` or `events`."""
    if value == "rounds":
        return "rounds"
    if value == "events":
        return "events"
    raise UnknownName("--trigger", value, ("rounds", "events"))
