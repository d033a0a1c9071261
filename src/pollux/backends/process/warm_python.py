"""How a process that was forked with everything imported becomes the interpreter of `python SCRIPT`.

Which commands may go this way, and how script and exit are made to look like those of a fresh interpreter. The rest of
a replica's surroundings is set in `fork_replica`.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
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

__all__ = ["PythonCall", "exit_code_of", "leave", "make_like_fresh", "python_call", "resolved", "run_python"]

# What interpreter, C library and PyTorch read once, when they are loaded: a forked process comes too late for it.
_READ_ONCE = (
    "PYTHON", "LD_", "LANG", "LC_", "MALLOC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "TORCH", "PYTORCH_",
)  # fmt: skip
_SET_LATE = frozenset(
    {"PYTHONUNBUFFERED", "OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"}
    | {"TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"}
)


_before: set[str] = set()


@dataclass(frozen=True, slots=True)
class PythonCall:
    """`python SCRIPT args` (a file) or `python -m MODULE args`; the other of the two is empty."""

    script: str
    module: str
    arguments: tuple[str, ...]


def resolved(command: str, environ: Mapping[str, str], path_was_set: bool) -> str | None:
    """The file that a command's first word means; None for none.

    `python` alone is the interpreter of Pollux, unless the job sets a PATH of its own.
    """
    if command in BARE_PYTHON and not path_was_set:
        return sys.executable
    if os.path.dirname(command):
        return command
    beside = os.path.dirname(sys.executable)
    return shutil.which(command, path=environ.get("PATH", os.defpath)) or shutil.which(command, path=beside)


def _is_ours(executable: str) -> bool:
    """The same program in the same folder: an environment's interpreter is a link to one that others link to too."""
    return os.path.realpath(executable) == os.path.realpath(sys.executable) and (
        os.path.realpath(os.path.dirname(executable)) == os.path.realpath(os.path.dirname(sys.executable))
    )


def python_call(
    argv: Sequence[str], executable: str, workdir: str, environ: Mapping[str, str], ours: Mapping[str, str]
) -> PythonCall | None:
    """What a forked interpreter would run; None where only a fresh one is right.

    That is: another program or interpreter, flags of the interpreter, or variables that differ from `ours`, those of
    this process, although they are read only once.
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
    """Whether a variable that is read only once is to be another than the one that was read here."""
    names = {name for name in {*environ, *ours} if name.startswith(_READ_ONCE) and name not in _SET_LATE}
    return any(environ.get(name) != ours.get(name) for name in names)


def _shadows(folder: str) -> bool:
    """Whether a module there has the name of one that is imported already, so that the wrong one would be used."""
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
    """Undo what this process has of the one it was forked from: signals, streams, variables, random numbers."""
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
    """Run it as `__main__` and return the exit code; what it left (threads, exit handlers, files) is for the exit."""
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
    """End the process as an interpreter does: threads, exit handlers, what the script still holds, streams.

    Modules that were there before the fork are left alone: taking them apart would copy all the memory they share.
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
    """Let go of the script and what it imported, so that open files are written and destructors run."""
    # Threads that nobody waits for find nothing any more; in a real interpreter they would have been frozen.
    threading.excepthook = lambda told: None
    namespace = vars(sys.modules["__main__"])
    for name in [name for name in sys.modules if name not in _before]:
        del sys.modules[name]
    # Functions that somebody keeps hold on to the whole of it; and destructors may need the built-in names.
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
    """What an interpreter does with an error that nobody caught: exit handlers can tell it from an end."""
    sys.last_type, sys.last_value = type(error), error
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    _show(error)
    sys.last_traceback = error.__traceback__


def _show(error: BaseException) -> None:
    """The traceback as it would be without the frames of this file."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)


def exit_code_of(stop: SystemExit) -> int:
    """The exit code that an interpreter gives it; a text goes to the error stream, and the code is 1."""
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code & 0xFF
    print(stop.code, file=sys.stderr)
    return 1
