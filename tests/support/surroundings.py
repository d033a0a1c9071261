"""Makes variables, umask and signals the same for every test run, whoever starts it and wherever.

`tests/unit/cli/test_surroundings.py` and `tools/test_environments.py` test how Pollux behaves in other surroundings.
"""

from __future__ import annotations

import os
import resource
import signal
import tempfile
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path

from pollux.wire.environment import TORCHRUN_VARIABLES

__all__ = ["hearing", "settle", "settle_variables"]

# Settings of the tests themselves; every other POLLUX_ variable is a setting of the user.
_FOR_TESTS = frozenset(
    {
        "POLLUX_BENCH_FOLDER", "POLLUX_CHROMIUM", "POLLUX_FAULT_EVENTS", "POLLUX_FAULT_SEED", "POLLUX_OSDI21_DATA",
        "POLLUX_PROMETHEUS", "POLLUX_RECORD", "POLLUX_RERECORD", "POLLUX_SCHEMA_EXAMPLES", "POLLUX_TEST_NAMESPACE",
        "POLLUX_TEST_RECORD",
    }
)  # fmt: skip
_TERMINAL = frozenset(
    {
        "CLICOLOR", "CLICOLOR_FORCE", "COLUMNS", "FORCE_COLOR", "LINES", "NO_COLOR", "PY_COLORS", "TERMINAL_WIDTH",
        "TTY_COMPATIBLE", "TTY_INTERACTIVE",
    }
)  # fmt: skip
_LANGUAGE = frozenset({"LANGUAGE", "PYTHONCOERCECLOCALE", "PYTHONIOENCODING", "PYTHONUTF8"})
_OF_PROGRAMS = frozenset(
    {"MPLBACKEND", "MPLCONFIGDIR", "PYTEST_ADDOPTS", "PYTHONOPTIMIZE", "PYTHONWARNINGS", "XDG_CACHE_HOME"}
)
_PROXIES = frozenset({"all_proxy", "ftp_proxy", "http_proxy", "https_proxy", "no_proxy"})
# The owner of the GPUs decides which of them may be used.
_TORCHRUN = frozenset(TORCHRUN_VARIABLES) - {"CUDA_VISIBLE_DEVICES"}
_OPEN_FILES = 4096
_PREFIXES = (
    "AWS_", "GIT_", "LC_", "POLLUX_", "RAY_", "SALLOC_", "SBATCH_", "SCANCEL_", "SINFO_", "SLURM_", "SQUEUE_", "SRUN_",
    "TORCHELASTIC_",
)  # fmt: skip


def settle() -> None:
    """Make this process, and all processes that tests start, independent of the shell that started it."""
    settle_variables(os.environ)
    os.umask(0o022)
    _settle_signals()
    _settle_open_files()


def settle_variables(environ: MutableMapping[str, str]) -> None:
    """Remove variables that a user has set for other purposes; set a common terminal, language and home folder."""
    dropped = _TERMINAL | _LANGUAGE | _TORCHRUN | _OF_PROGRAMS
    for name in list(environ):
        is_ours = name in _FOR_TESTS
        if not is_ours and (name in dropped or name.lower() in _PROXIES or name.startswith(_PREFIXES)):
            del environ[name]
    environ.update({"LANG": "C.UTF-8", "TERM": "xterm"})
    if not os.access(environ.get("HOME", ""), os.W_OK | os.X_OK):
        # Libraries write to the home folder, and warn if they cannot.
        environ["HOME"] = str(_spare_home())


def _spare_home() -> Path:
    """One folder for all test processes of a user, so that libraries fill it once."""
    home = Path(tempfile.gettempdir()) / f"pollux-tests-home-{os.getuid()}"
    home.mkdir(mode=0o700, exist_ok=True)
    return home


def _settle_signals() -> None:
    """Unblock all signals, and reset SIGTERM if it is ignored, for this process and those that it starts.

    Signals that `nohup` and a shell's `&` ignore stay ignored, so that a test run outlives its terminal; `hearing`
    resets those for a while.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if signal.getsignal(signal.SIGTERM) == signal.SIG_IGN:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _settle_open_files() -> None:
    """Allow as many open files as servers under test need; some shells allow 256."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # Some containers forbid it.
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextmanager
def hearing(*numbers: signal.Signals) -> Iterator[None]:
    """Processes that are started inside do not ignore these signals, even if this process does."""
    ignored = [number for number in numbers if signal.getsignal(number) == signal.SIG_IGN]
    for number in ignored:
        # A handler, unlike an ignored signal, becomes the default after `exec`.
        signal.signal(number, lambda number, frame: None)
    try:
        yield
    finally:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
