"""What the tests do not take from whoever runs them: made the same everywhere, before anything is tested.

How the product itself behaves in other surroundings is what `tests/unit/cli/test_surroundings.py` and
`tools/test_environments.py` are for.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path

from pollux.wire.environment import TORCHRUN_VARIABLES

__all__ = ["hearing", "settle", "settle_variables"]

# What tells the tests themselves something; every other POLLUX_ variable is a setting of the user's own.
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
_PROXIES = frozenset({"all_proxy", "ftp_proxy", "http_proxy", "https_proxy", "no_proxy"})
# Which GPUs may be used is for their owner to say.
_TORCHRUN = frozenset(TORCHRUN_VARIABLES) - {"CUDA_VISIBLE_DEVICES"}
_PREFIXES = (
    "AWS_", "GIT_", "LC_", "POLLUX_", "RAY_", "SALLOC_", "SBATCH_", "SCANCEL_", "SINFO_", "SLURM_", "SQUEUE_", "SRUN_",
    "TORCHELASTIC_",
)  # fmt: skip


def settle() -> None:
    """Make this process, and with it all that tests start, independent of the shell it was started from."""
    settle_variables(os.environ)
    os.umask(0o022)
    _settle_signals()


def settle_variables(environ: MutableMapping[str, str]) -> None:
    """Leave out what a user has set for other purposes; a terminal, a language and a home folder as everywhere."""
    dropped = _TERMINAL | _LANGUAGE | _TORCHRUN | {"PYTHONWARNINGS"}
    for name in list(environ):
        is_ours = name in _FOR_TESTS
        if not is_ours and (name in dropped or name.lower() in _PROXIES or name.startswith(_PREFIXES)):
            del environ[name]
    environ.update({"LANG": "C.UTF-8", "TERM": "xterm"})
    if not os.access(environ.get("HOME", ""), os.W_OK | os.X_OK):
        # Libraries keep things there, and complain where they cannot.
        environ["HOME"] = str(_spare_home())


def _spare_home() -> Path:
    """The same for all processes of one user, so that what libraries keep there is made once."""
    home = Path(tempfile.gettempdir()) / f"pollux-tests-home-{os.getuid()}"
    home.mkdir(mode=0o700, exist_ok=True)
    return home


def _settle_signals() -> None:
    """No signal blocked, and SIGTERM not ignored, for what is started from here.

    Those that `nohup` and a shell's `&` ignore stay so, or a test run would not outlive its terminal; see `hearing`.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if signal.getsignal(signal.SIGTERM) == signal.SIG_IGN:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def hearing(*numbers: signal.Signals) -> Iterator[None]:
    """Processes that are started inside have these signals at their default, also where they are ignored here."""
    ignored = [number for number in numbers if signal.getsignal(number) == signal.SIG_IGN]
    for number in ignored:
        # Caught and left alone here, which after `exec` is the default.
        signal.signal(number, lambda number, frame: None)
    try:
        yield
    finally:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
