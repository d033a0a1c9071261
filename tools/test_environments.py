"""Runs a quick part of the test suite in the surroundings of other people's machines: a line for each says how it went.

Usage: python tools/test_environments.py [NAME...] [--tests PATH...] [--list]

What is varied is what a shell hands on: variables, terminal, language, time zone, umask, user, home, PATH, signals and
input, and where the clone and temporary files lie.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
TESTS = (
    "tests/unit/cli/test_surroundings.py", "tests/unit/cli/test_looking_around.py",
    "tests/unit/cli/display/test_render.py",
    "tests/unit/cli/test_jobs.py", "tests/unit/cli/commands/cluster/test_top.py",
    "tests/unit/cli/commands/cluster/test_queues.py", "tests/unit/cli/commands/jobs/test_submit.py",
    "tests/unit/cli/client/test_folder_upload.py", "tests/unit/cli/test_main.py",
    "tests/unit/cli/arguments/test_output.py", "tests/unit/cli/display/test_run_screen.py",
    "tests/unit/wire/test_jobfile.py", "tests/unit/wire/test_job_file_page.py",
    "tests/unit/store/test_database_file.py", "tests/unit/store/test_sqlite.py",
    "tests/unit/backends/shim/test_remote_launcher.py", "tests/unit/backends/slurm/test_commands.py",
    "tests/unit/service/server/test_serve.py",
)  # fmt: skip
MOST_SECONDS = 900.0
_PROGRAMS = ("chromium", "docker", "go", "nvidia-smi", "prometheus", "ray", "sbatch", "scancel", "scontrol", "sinfo",
             "squeue", "srun", "sudo", "train")  # fmt: skip
_ODD_FOLDER = "a folder für 'Tests'"


@dataclass(frozen=True)
class Environment:
    """What differs from here. A variable that is None is not set; `user` is root or plain, where it can be had.

    `open_files`: the soft limit of open files. `venv`: another path to the environment of packages.
    """

    variables: Mapping[str, str | None] = field(default_factory=dict)
    umask: int | None = None
    ignored: Sequence[signal.Signals] = ()
    blocked: Sequence[signal.Signals] = ()
    is_input_closed: bool = False
    user: str = ""
    open_files: int | None = None
    venv: str = ""


_NO_LANGUAGE = dict.fromkeys(("LANG", "LC_ALL", "LC_CTYPE", "LANGUAGE"))
_DEAD = "http://127.0.0.1:9"
ENVIRONMENTS: Mapping[str, Environment] = {
    "as-it-is": Environment(),
    "narrow": Environment({"COLUMNS": "20", "LINES": "5"}),
    "wide": Environment({"COLUMNS": "300"}),
    "colours": Environment({"FORCE_COLOR": "1", "CLICOLOR_FORCE": "1", "PY_COLORS": "1"}),
    "dumb": Environment({"TERM": "dumb", "NO_COLOR": "1"}),
    "no-terminal": Environment({"TERM": None}, is_input_closed=True),
    "no-language": Environment({**_NO_LANGUAGE}),
    "ascii": Environment({**_NO_LANGUAGE, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
    "latin-1": Environment({"PYTHONIOENCODING": "latin-1"}),
    "kathmandu": Environment({"TZ": "Asia/Kathmandu"}),
    "st-johns": Environment({"TZ": "America/St_Johns"}),
    "umask-077": Environment(umask=0o077),
    "umask-000": Environment(umask=0o000),
    "plain-user": Environment(user="plain"),
    "root": Environment(user="root"),
    "no-home": Environment({"HOME": None}),
    "home-not-there": Environment({"HOME": "/nowhere", "XDG_CACHE_HOME": "/nowhere", "XDG_CONFIG_HOME": "/nowhere"}),
    "odd-home": Environment({"HOME": "{odd}"}),
    "odd-path": Environment({"PATH": ":relative:/nowhere:/usr/bin:/bin:"}),
    "nothing-installed": Environment({"PATH": "{bare}"}),
    "all-installed": Environment({"PATH": "{full}:/usr/bin:/bin"}),
    "background": Environment(ignored=(signal.SIGINT, signal.SIGHUP)),
    "ignored": Environment(ignored=(signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGPIPE)),
    "blocked": Environment(blocked=(signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD)),
    "own-settings": Environment(
        {
            "POLLUX_HOME": "/nowhere", "POLLUX_SERVER": _DEAD, "POLLUX_TOKEN": "mine", "POLLUX_JOB": "mine",
            "POLLUX_GENERATION": "3", "POLLUX_STORE": "127.0.0.1:9", "POLLUX_ADAPT": "0", "POLLUX_HANG_SECONDS": "1",
        }
    ),
    "in-an-allocation": Environment(
        {
            "SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "1", "SLURM_CONF": "/nowhere",
            "SBATCH_ACCOUNT": "x", "RAY_ADDRESS": "127.0.0.1:9", "RANK": "5", "WORLD_SIZE": "9", "LOCAL_RANK": "1",
            "MASTER_ADDR": "nowhere",
            "MASTER_PORT": "1", "CUDA_VISIBLE_DEVICES": "3",
        }
    ),
    "dead-proxy": Environment(
        {"http_proxy": _DEAD, "https_proxy": _DEAD, "HTTP_PROXY": _DEAD, "ALL_PROXY": _DEAD, "no_proxy": None}
    ),
    "python": Environment(
        {"PYTHONHASHSEED": "7", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONWARNINGS": "error", "OMP_NUM_THREADS": "3"}
    ),
    "few-open-files": Environment(open_files=256),
    "odd-interpreter": Environment(venv="{odd}/venv"),
    "odd-temporary": Environment({"TMPDIR": "{odd}"}),
    "odd-clone": Environment({"PYTHONPATH": "{clone}/src"}),
}  # fmt: skip


@contextmanager
def places() -> Iterator[dict[str, Path]]:
    """A folder with an odd name, folders of programs, and where a clone may be made; gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="pollux-", ignore_cleanup_errors=True) as made:
        found = {name: Path(made) / name for name in ("bare", "full")}
        found["odd"] = Path(made) / _ODD_FOLDER
        found["clone"] = found["odd"] / "clone"
        for name in ("bare", "full", "odd"):
            found[name].mkdir(mode=0o755)
        (found["odd"] / "venv").symlink_to(sys.prefix)
        for program in (*Path("/bin").iterdir(), *Path("/usr/bin").iterdir()):
            if not (found["bare"] / program.name).exists() and program.name not in _PROGRAMS:
                (found["bare"] / program.name).symlink_to(program)
        for name in _PROGRAMS:
            (found["full"] / name).write_text("#!/bin/sh\nexit 3\n", encoding="utf-8")
            (found["full"] / name).chmod(0o755)
        yield found


def words_of(environment: Environment) -> tuple[list[str], str]:
    """What comes before the command, and why it cannot be had here; empty where it can."""
    is_root = os.geteuid() == 0
    if not environment.user or (environment.user == "root") == is_root:
        return [], ""
    words = ["unshare", "--user", *(["--map-user=1000", "--map-group=1000"] if is_root else ["--map-root-user"])]
    try:
        subprocess.run([*words, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return [], "no user namespaces here"
    return words, ""


def run(environment: Environment, tests: Sequence[str], found: Mapping[str, Path]) -> tuple[bool, str]:
    """Whether all passed, and pytest's last line; the whole output where they did not."""
    words, missing = words_of(environment)
    if missing:
        return True, f"left out: {missing}"
    given = {name: value and value.format(**found) for name, value in environment.variables.items()}
    environ = {name: value for name, value in {**os.environ, **given}.items() if value is not None}
    folder = REPOSITORY
    if any("{clone}" in (value or "") for value in environment.variables.values()):
        folder = found["clone"]
        leave = shutil.ignore_patterns(".venv", ".git", "build", "site", "__pycache__", ".*_cache", ".hypothesis")
        shutil.copytree(REPOSITORY, folder, ignore=leave)

    def change() -> None:
        if environment.umask is not None:
            os.umask(environment.umask)
        if environment.open_files is not None:
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (environment.open_files, hard))
        # Whatever this tool itself was started with, as by `nohup`.
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN if number in environment.ignored else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, environment.blocked)
        if environment.is_input_closed:
            os.close(0)

    python = f"{environment.venv.format(**found)}/bin/python" if environment.venv else sys.executable
    command = [python, "-m", "pytest", "-n", "2", "-q", "--no-header", "--force-reruns", "0", "--tb", "short"]
    command = [*words, *command, "-p", "no:cacheprovider", *tests]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environ, stdout=output, stderr=output, start_new_session=True,
            restore_signals=False, preexec_fn=change,
        )  # fmt: skip
        try:
            code: int | None = process.wait(MOST_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        said = re.sub(r"\x1b\[[0-9;]*m", "", output.read().decode("utf-8", "replace")).strip()
    if code == 0:
        return True, said.splitlines()[-1]
    return False, f"out of time\n{said}" if code is None else f"{said.splitlines()[-1]}\n{said}"


def main() -> int:
    """The command; 1 where something failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="environments; all of them where none is named")
    parser.add_argument("--tests", nargs="+", default=TESTS, metavar="PATH", help="what to run; a quick part otherwise")
    parser.add_argument("--list", action="store_true", help="only name the environments")
    options = parser.parse_args()
    if options.list:
        print(*ENVIRONMENTS, sep="\n")
        return 0
    if unknown := [name for name in options.names if name not in ENVIRONMENTS]:
        parser.error(f"no environment {', '.join(unknown)}; --list names them")
    failed = False
    with places() as found:
        for name in options.names or ENVIRONMENTS:
            began = time.monotonic()
            is_well, said = run(ENVIRONMENTS[name], options.tests, found)
            line, _, rest = said.partition("\n")
            print(
                f"{name:<18} {'ok    ' if is_well else 'FAILED'} {line}  [{time.monotonic() - began:.0f} s]", flush=True
            )
            if not is_well:
                print(rest, flush=True)
                failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
