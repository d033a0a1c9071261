"""Which commands may run in a forked interpreter, and which need a fresh one."""

import os
import subprocess
import sys

import pytest

from pollux.backends.process.warm_python import PythonCall, python_call, resolved


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "a_script.py").write_text("")
    return str(tmp_path)


def call(folder, *argv, environ=None, ours=None):
    return python_call(argv, sys.executable, folder, environ or {}, ours or {})


def test_scripts_and_modules(folder):
    assert call(folder, "python", "a_script.py", "x") == PythonCall("a_script.py", "", ("x",))
    assert call(folder, "python", "-m", "mod", "-x") == PythonCall("", "mod", ("-x",))


@pytest.mark.parametrize(
    "argv",
    [("python",), ("python", "-c", "pass"), ("python", "-u", "a_script.py"), ("python", "absent.py"), ("python", "-m")],
)
def test_anything_else_gets_a_fresh_one(folder, argv):
    assert call(folder, *argv) is None


def test_another_interpreter_gets_its_own(folder, tmp_path):
    other = tmp_path / "bin" / "python"
    other.parent.mkdir()
    other.symlink_to(os.path.realpath(sys.executable))
    assert python_call(("python", "a_script.py"), str(other), folder, {}, {}) is None


@pytest.mark.parametrize(
    "name", ["PYTHONPATH", "PYTHONHASHSEED", "LD_PRELOAD", "MKL_NUM_THREADS", "TORCH_LOGS", "LANG"]
)
def test_variables_that_are_read_only_once(folder, name):
    assert call(folder, "python", "a_script.py", environ={name: "x"}) is None
    assert call(folder, "python", "a_script.py", ours={name: "x"}) is None
    assert call(folder, "python", "a_script.py", environ={name: "x"}, ours={name: "x"}) is not None


@pytest.mark.parametrize(
    "name", ["OMP_NUM_THREADS", "PYTHONUNBUFFERED", "TORCHELASTIC_RUN_ID", "MY_OWN", "CUDA_VISIBLE_DEVICES"]
)
def test_variables_that_may_differ(folder, name):
    assert call(folder, "python", "a_script.py", environ={name: "x"}) is not None


def test_names_that_are_imported_already(folder, tmp_path):
    (tmp_path / "json.py").write_text("")
    assert call(folder, "python", "a_script.py") is None


def test_what_a_command_means():
    assert resolved("python", {"PATH": "/nowhere"}, False) == sys.executable
    assert resolved("python3", {"PATH": "/nowhere"}, False) == sys.executable
    assert resolved("/usr/bin/env", {}, False) == "/usr/bin/env"
    assert resolved("no-such-command", {"PATH": "/nowhere"}, False) is None


def test_a_path_of_the_jobs_own_decides(tmp_path):
    mine = tmp_path / "python"
    mine.write_text("#!/bin/sh\n")
    mine.chmod(0o755)
    assert resolved("python", {"PATH": str(tmp_path)}, True) == str(mine)


RUNS = """
import sys
from pollux.backends.process.warm_python import PythonCall, leave, run_python
leave(run_python(PythonCall(sys.argv[1], "", ())))
"""


@pytest.mark.parametrize(("ends", "code"), [("1 / 0", 1), ("sys.exit(3)", 3), ("pass", 0)])
def test_exit_handlers_can_tell_an_error_from_an_end(tmp_path, ends, code):
    """As in a fresh interpreter, which such a script is run by too."""
    script = tmp_path / "ends.py"
    asks = "import atexit, sys\natexit.register(lambda: print(type(getattr(sys, 'last_value', None)).__name__))\n"
    script.write_text(asks + ends)
    for command in ([sys.executable, str(script)], [sys.executable, "-c", RUNS, str(script)]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (code, "ZeroDivisionError\n" if code == 1 else "NoneType\n")
        assert ("ZeroDivisionError: division by zero" in done.stderr) == (code == 1)
