"""Prints text so that control characters in it do not control the terminal."""

from __future__ import annotations

import typer

from pollux.wire.visible_text import visible

__all__ = ["say"]


def say(text: str, err: bool = False, nl: bool = True) -> None:
    """Print text on standard output, or on standard error, with unsafe characters written out."""
    typer.echo(visible(text), err=err, nl=nl)
