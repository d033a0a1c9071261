"""Imports what training scripts import, and runs `python SCRIPT` in a process forked from there like in a fresh one.

Decides which commands can run this way. `fork_replica` sets session, files and cores of the process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import os
import runpy
import shutil
import signal
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pollux.wire.job import BARE_PYTHON

__all__ = [
    "PRELOADED",
    "PythonCall",
    "exit_code_of",
    "import_all",
    "leave",
    "make_like_fresh",
    "python_call",
    "resolved",
    "run_python",
]

# The interpreter, the C library and PyTorch read these variables when they are loaded, which is before the fork.
_READ_ONCE = (
    "PYTHON", "LD_", "LANG", "LC_", "MALLOC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "TORCH", "PYTORCH_",
)  # fmt: skip
_SET_LATE = frozenset(
    {"PYTHONUNBUFFERED", "OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"}
    | {"TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"}
)

PRELOADED = (
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.nn.parallel",
    "torch.utils.data",
    "pollux.agent",
)
"""The modules to import where they are installed: PyTorch, what its first optimiser would import, and the agent."""

_THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
# Asks the driver's library whether there are GPUs, instead of opening them, which would spoil every fork.
_GPU_CHECK = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


_before: set[str] = set()


def import_all() -> bool:
    """Import what training scripts import, and restore the environment; whether forks are safe from now on."""
    variables = dict(os.environ)
    os.environ.update(_THREADS | _GPU_CHECK)
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    os.environ.clear()
    os.environ.update(variables)
    return len(os.listdir("/proc/self/task")) == 1


@dataclass(frozen=True, slots=True)
class PythonCall:
    """`python SCRIPT args` (a file) or `python -m MODULE args`; the other of the two is empty."""

    script: str
    module: str
    arguments: tuple[str, ...]


def resolved(command: str, environ: Mapping[str, str], path_was_set: bool) -> str | None:
    """The file of a command's first word; None where there is none.

    `python` alone is the interpreter of Pollux, unless the job sets a PATH of its own.
    """
    if command in BARE_PYTHON and not path_was_set:
        return sys.executable
    if os.path.dirname(command):
        return command
    beside = os.path.dirname(sys.executable)
    return shutil.which(command, path=environ.get("PATH", os.defpath)) or shutil.which(command, path=beside)


def _is_ours(executable: str) -> bool:
    """Whether this is our interpreter: the same program in the same folder, since environments link to one program."""
    return os.path.realpath(executable) == os.path.realpath(sys.executable) and (
        os.path.realpath(os.path.dirname(executable)) == os.path.realpath(os.path.dirname(sys.executable))
    )


def python_call(
    argv: Sequence[str], executable: str, workdir: str, environ: Mapping[str, str], ours: Mapping[str, str]
) -> PythonCall | None:
    """The script or module that a forked interpreter can run; None where the command needs a fresh interpreter.

    It needs one for another program or interpreter, for flags of the interpreter, and where variables read at its
    start differ from `ours`, those of this process.
    """
    if len(argv) < 2 or not _is_ours(executable) or _comes_too_late(environ, ours):
        return None
    if argv[1] == "-m" and len(argv) > 2 and not argv[2].startswith("-"):
        call, folder = PythonCall("", argv[2], tuple(argv[3:])), workdir
    else:
        script = os.path.join(workdir, argv[1])
        if argv[1].startswith("-") or not os.path.isfile(script):
            return None
        call, folder = PythonCall(argv[1], "", tuple(argv[2:])), os.path.dirname(os.path.realpath(script))
    return None if _shadows(folder) else call


def _comes_too_late(environ: Mapping[str, str], ours: Mapping[str, str]) -> bool:
    """Whether a variable that is read only once differs from the one that this process has read."""
    names = {name for name in {*environ, *ours} if name.startswith(_READ_ONCE) and name not in _SET_LATE}
    return any(environ.get(name) != ours.get(name) for name in names)


def _shadows(folder: str) -> bool:
    """Whether a module in that folder has the name of one that is imported already, so that it would not be loaded."""
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    taken = {name.partition(".")[0] for name in sys.modules}
    return any(
        name.removesuffix(".py") in taken
        for name in names
        if (name.endswith(".py") and name != "__main__.py") or os.path.isfile(os.path.join(folder, name, "__init__.py"))
    )


def make_like_fresh(environ: Mapping[str, str], argv: Sequence[str], threads: int) -> None:
    """Replace what this process has from its parent: signals, streams, variables, random numbers."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environ)
    unbuffered = bool(environ.get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.stdout = sys.__stdout__ = _stream(1, "strict", unbuffered)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _stream(2, "backslashreplace", True)  # type: ignore[misc]
    sys.orig_argv = [*argv]
    loaded = sys.modules
    if "multiprocessing.process" in loaded:
        process: Any = loaded["multiprocessing.process"]
        process.ORIGINAL_DIR = os.getcwd()
        process.current_process().authkey = os.urandom(32)
    if "numpy.random" in loaded:
        loaded["numpy.random"].seed()
    if "torch" in loaded:
        loaded["torch"].set_num_threads(threads)


def _stream(number: int, errors: str, unbuffered: bool) -> io.TextIOWrapper:
    raw = open(number, "wb", buffering=0 if unbuffered else -1, closefd=False)  # noqa: SIM115
    return io.TextIOWrapper(raw, errors=errors, write_through=unbuffered, line_buffering=unbuffered)


def run_python(call: PythonCall) -> int:
    """Run the script as `__main__` and return the exit code; `leave` then ends its threads, exit handlers and files."""
    del sys.modules["__main__"]
    _before.update(sys.modules)
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.argv = [call.script or "-m", *call.arguments]
    own = os.path.dirname(os.path.realpath(call.script)) if call.script else os.getcwd()
    if not os.environ.get("PYTHONSAFEPATH"):
        sys.path.insert(0, own)
    try:
        if call.module:
            runpy._run_module_as_main(call.module, alter_argv=True)  # type: ignore[attr-defined]
        else:
            _run_script(call.script, main)
    except SystemExit as stop:
        return exit_code_of(stop)
    except KeyboardInterrupt as error:
        _fail(error)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        return 130
    except BaseException as error:
        _fail(error)
        return 1
    return 0


def leave(code: int) -> int:
    """End the process as an interpreter does: threads, exit handlers, objects of the script, streams.

    Modules that were imported before the fork are left alone: to destroy them would copy all the shared memory.
    """
    for step in (threading._shutdown, atexit._run_exitfuncs, _drop_modules):  # type: ignore[attr-defined]
        try:
            step()
        except BaseException as error:
            _show(error)
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        code = code or 120
    ctypes.CDLL(None).fflush(None)
    os._exit(code)


def _drop_modules() -> None:
    """Drop the script and the modules that it imported, so that open files are written and destructors run."""
    # Daemon threads now fail as their modules are gone; a real interpreter would have frozen them.
    threading.excepthook = lambda arguments: None
    namespace = vars(sys.modules["__main__"])
    for name in [name for name in sys.modules if name not in _before]:
        del sys.modules[name]
    # A function that is still referenced keeps the whole namespace alive; destructors may need the built-in names.
    for name in [name for name in namespace if name != "__builtins__"]:
        namespace[name] = None
    gc.collect()


def _run_script(script: str, main: types.ModuleType) -> None:
    script = os.path.abspath(script)
    main.__file__ = script
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    main.__dict__["__cached__"] = None
    with io.open_code(script) as source:
        code = compile(source.read(), script, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def _fail(error: BaseException) -> None:
    """Treat an uncaught error as an interpreter does: exit handlers can see it in `sys`."""
    sys.last_type, sys.last_value = type(error), error
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    _show(error)
    sys.last_traceback = error.__traceback__


def _show(error: BaseException) -> None:
    """Print the traceback without the frames of this file."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)


def exit_code_of(stop: SystemExit) -> int:
    """The exit code of an interpreter for this SystemExit; a text goes to the error stream, with code 1."""
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code & 0xFF
    print(stop.code, file=sys.stderr)
    return 1
