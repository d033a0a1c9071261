"""The kind of a job whose user names none: what its command has in common with those of like jobs."""

from __future__ import annotations

import functools

__all__ = ["LEFT_OUT", "default_kind"]

LEFT_OUT = (
    "seed", "epoch", "epochs", "lr", "learning-rate", "output", "output-dir", "out", "out-dir", "outdir", "log-dir",
    "logdir", "save-dir", "checkpoint-dir", "run-name",
)  # fmt: skip
"""Options that do not change how fast a job trains: those whose name is, or ends in, one of these."""


@functools.lru_cache(maxsize=4096)
def default_kind(run: tuple[str, ...]) -> str:
    """The command without the options of `LEFT_OUT` and their values: `--seed 1`, `--seed=1`, `trainer.seed=1`."""
    kept: list[str] = []
    drop = False
    for position, argument in enumerate(run):
        named, given = _is_left_out(argument) if position else (False, False)
        is_value = drop and (not argument.startswith("-") or _is_number(argument))
        drop = named and not given
        if not named and not is_value:
            kept.append(argument)
    return " ".join(kept)


def _is_left_out(argument: str) -> tuple[bool, bool]:
    """Whether an argument is such an option, and whether its value is in it."""
    name, equals, _ = argument.partition("=")
    if not equals and not name.startswith("-"):
        return False, False
    words = "-" + name.lstrip("-").replace("_", "-").replace(".", "-").lower()
    return any(words.endswith(f"-{option}") for option in LEFT_OUT), bool(equals)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
