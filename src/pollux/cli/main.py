"""The `pollux` command itself: how its sub-commands are found, and how errors end it.

Exit codes are those the errors carry; usage errors are 2, an interrupt is 130.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from pollux.cli.arguments.options import PARTIAL, print_json
from pollux.cli.printing.streams import replace_unencodable, whole_output
from pollux.cli.printing.visible import say
from pollux.cli.registry import LazyGroup
from pollux.core.errors import PolluxError
from pollux.core.version import __version__

__all__ = ["app", "main"]

# Some versions of typer bring their own copy of click, so its classes are reached through typer's.
_UsageError: Any = typer.BadParameter.__base__

_INTERRUPTED = 130
_ALL_OR_NOTHING = ("simulate", "whatif", "workload", "history")
_WORDS = "pollux.words"


def _wants_json(words: Sequence[str]) -> bool:
    """Whether `--json` is given to Pollux itself: before `--`, and before the script of `pollux run`."""
    ours = list(words)
    if "--" in ours:
        ours = ours[: ours.index("--")]
    if ours[:1] == ["run"]:
        ours = list(itertools.takewhile(lambda word: not word.endswith((".py", ".sh")), ours))
    return "--json" in ours


def _print_error(meta: Mapping[str, Any], code: str, message: str, retryable: bool, exit_code: int) -> None:
    """One line on standard error; with `--json` also a JSON document in the shape of the service's errors.

    That document also has the results up to the error.
    """
    line = " ".join(message.split())
    say(f"error: {line}", err=True)
    if _wants_json(meta.get(_WORDS, ())):
        error = {"code": code, "message": line, "retryable": retryable, "exit_code": exit_code}
        print_json({**meta.get(PARTIAL, {}), "error": error})


@contextmanager
def _one_line_errors(ctx: Any) -> Iterator[None]:
    kind, retryable = "UsageError", False
    try:
        yield
    except PolluxError as error:
        message, code = str(error), error.exit_code
        kind, retryable = type(error).__name__, error.retryable
    except KeyboardInterrupt:
        writes = ctx.invoked_subcommand in _ALL_OR_NOTHING
        kind, retryable = "Interrupted", True
        message, code = f"interrupted{'; nothing was written' if writes else ''}", _INTERRUPTED
    except _UsageError as error:
        where = f"; see '{error.ctx.command_path} --help'" if error.ctx else ""
        message, code = f"{error.format_message().rstrip('.')}{where}", 2
    else:
        return
    _print_error(ctx.meta, kind, message, retryable, code)
    raise typer.Exit(code)


class _Program(LazyGroup):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[_WORDS] = tuple(args)
        with _one_line_errors(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with _one_line_errors(ctx):
            return super().invoke(ctx)


app = typer.Typer(
    cls=_Program,
    help="Goodput-optimised scheduling of deep-learning jobs (Pollux, OSDI'21).",
    epilog="Example: pollux simulate --policies pollux,tiresias",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        say(f"pollux {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _start(
    ctx: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def main() -> None:
    """Run the command line."""
    replace_unencodable()
    run: Callable[..., None] = app
    with whole_output():
        run(prog_name="pollux")
