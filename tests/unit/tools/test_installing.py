"""What the development targets install, with a package manager that is none: nothing here asks a real one."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TOOLS = ROOT / "tools"
NEEDED = ("cat", "chmod", "dirname", "env", "grep", "head", "mkdir", "mktemp", "mv", "rm", "sh", "true")
PACKAGES = {
    "Chromium": ([TOOLS / "install_chromium.sh"], "chromium fonts-dejavu-core"),
    "Prometheus": ([TOOLS / "install_prometheus.sh"], "prometheus"),
    "Slurm": ([sys.executable, TOOLS / "slurm" / "cluster.py", "install"], "slurm-wlm munge"),
}


class Machine:
    """A search path with little on it, and the words with which the package manager was asked."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.asked = folder / "bin", folder / "asked"
        self.folder.mkdir()
        self.asked.touch()
        # A copy: the script of Prometheus unpacks into the clone, and looks there first.
        self.tools = folder / "clone" / "tools"
        shutil.copytree(TOOLS, self.tools)
        for name in NEEDED:
            (self.folder / name).symlink_to(shutil.which(name))

    def has(self, name: str, does: str) -> None:
        """A program that does so; `$0` and all words are noted first."""
        program = self.folder / name
        program.write_text(f'#!/bin/sh\necho "{name} $*" >> {self.asked}\n{does}\n')
        program.chmod(0o755)

    def user(self, number: int) -> None:
        (self.folder / "id").write_text(f"#!/bin/sh\necho {number}\n")
        (self.folder / "id").chmod(0o755)

    def run(self, part: str) -> subprocess.CompletedProcess[str]:
        words = [str(word).replace(str(TOOLS), str(self.tools)) for word in PACKAGES[part][0]]
        return subprocess.run(words, env={"PATH": str(self.folder)}, capture_output=True, text=True, check=False)

    def words(self) -> list[str]:
        return self.asked.read_text().splitlines()


@pytest.fixture
def machine(tmp_path):
    # The folders that the script of Slurm searches beside the path.
    text = (TOOLS / "slurm" / "cluster.py").read_text()
    made = Machine(tmp_path)
    (made.tools / "slurm" / "cluster.py").write_text(text.replace('"/usr/sbin", "/sbin", "/usr/local/sbin"', ""))
    made.user(0)
    made.has("sleep", "")
    made.has("dpkg-deb", 'mkdir -p "$3/usr/bin" && echo > "$3/usr/bin/prometheus" && chmod +x "$3/usr/bin/prometheus"')
    return made


def left_out(done: subprocess.CompletedProcess[str], part: str) -> str:
    """The one line that says what is left out, why, and the remedy."""
    assert done.returncode == 1, (done.stdout, done.stderr)
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{part} is left out: "), line
    assert "remedy: " in line
    assert PACKAGES[part][1] in line
    return line


@pytest.mark.parametrize("part", PACKAGES)
def test_without_a_package_manager_one_line_says_what_is_left_out(machine, part):
    assert "no apt-get" in left_out(machine.run(part), part)


@pytest.mark.parametrize("part", PACKAGES)
@pytest.mark.parametrize("sudo", ["none", "asks for a password"])
def test_a_plain_user_is_told_in_one_line_what_to_ask_for(machine, part, sudo):
    machine.user(1000)
    machine.has("apt-get", 'echo "E: Unable to locate package" >&2; exit 100')
    if sudo != "none":
        machine.has("sudo", 'echo "sudo: a password is required" >&2; exit 1')
    assert "have an administrator run: apt-get update && " in left_out(machine.run(part), part)
    assert not [words for words in machine.words() if " install " in words or " update" in words]


@pytest.mark.parametrize("part", PACKAGES)
def test_what_cannot_be_fetched_is_said_in_one_line(machine, part):
    """As root, without a network: the package manager has a lot to say, of which one line is told."""
    machine.has("apt-get", 'echo "Reading..."; echo "E: Unable to fetch it" >&2; echo "E: Held broken" >&2; exit 100')
    assert "apt-get says 'E: Unable to fetch it'" in left_out(machine.run(part), part)


@pytest.mark.parametrize("part", ["Chromium", "Slurm"])
def test_a_user_who_may_installs_by_sudo(machine, part):
    machine.user(1000)
    machine.has("apt-get", "")
    machine.has("sudo", 'shift; exec "$@"')
    done = machine.run(part)
    assert (done.returncode, done.stderr) == (0, "")
    (words,) = [words for words in machine.words() if words.startswith("apt-get") and " install " in words]
    assert words.endswith(f" install -y --no-install-recommends {PACKAGES[part][1]}")


@pytest.mark.parametrize("part", ["Chromium", "Slurm"])
def test_another_one_who_asks_the_package_manager_is_waited_for(machine, part):
    """apt-get waits for dpkg's lock alone, where it is told to; for the lock of its lists it never does."""
    held = f"{machine.folder}/held"
    machine.has(
        "apt-get",
        f'case "$*" in *update) echo >> {held}; test $(grep -c "" {held}) -gt 3 && exit 0; '
        'echo "E: Could not get lock /var/lib/apt/lists/lock. It is held by process 7 (apt-get)" >&2; exit 100;; esac',
    )
    assert machine.run(part).returncode == 0
    asked = machine.words()
    assert len([words for words in asked if words.startswith("sleep")]) == 3
    assert len([words for words in asked if words.endswith(" update")]) == 4
    assert " -o DPkg::Lock::Timeout=600 install " in asked[-1]


def test_a_lock_that_nobody_lets_go_of_is_not_waited_for_without_end(machine):
    machine.has("apt-get", 'echo "E: Could not get lock /var/lib/dpkg/lock-frontend" >&2; exit 100')
    assert "Could not get lock" in left_out(machine.run("Chromium"), "Chromium")


def test_prometheus_is_unpacked_once_and_found_again(machine):
    machine.user(1000)
    machine.has("apt-get", 'case "$*" in *download*) echo > prometheus_2_amd64.deb ;; esac')
    first, asked = machine.run("Prometheus"), machine.words()
    assert (first.returncode, first.stderr) == (0, "")
    assert os.access(first.stdout.strip(), os.X_OK)
    second = machine.run("Prometheus")
    assert (second.stdout, machine.words()) == (first.stdout, asked)


def test_two_who_unpack_at_once_leave_a_whole_program(machine):
    """The other one was done between the question and the rename."""
    folder = machine.tools.parent / "build" / "tools" / "prometheus" / "usr" / "bin"
    machine.has(
        "apt-get",
        f"echo > prometheus_2_amd64.deb; mkdir -p {folder}; echo > {folder}/prometheus; chmod +x {folder}/prometheus",
    )
    done = machine.run("Prometheus")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{folder}/prometheus\n", "")
    assert sorted(path.name for path in folder.parents[2].iterdir()) == ["prometheus"]


@pytest.mark.parametrize("part", PACKAGES)
def test_what_is_there_is_not_asked_for(machine, part):
    programs = {"Chromium": ["chromium"], "Prometheus": ["prometheus"]}
    slurm = ["munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "sinfo", "scancel", "scontrol"]
    for name in programs.get(part, slurm):
        machine.has(name, "")
    machine.has("apt-get", "exit 100")
    assert machine.run(part).returncode == 0
    assert machine.words() == []


def test_only_one_script_asks_the_package_manager():
    files = [path for path in TOOLS.rglob("*") if path.is_file() and path.suffix in (".sh", ".py")]
    asking = {path.name for path in [*files, ROOT / "Makefile"] if "apt-get" in path.read_text()}
    # The bare machine is a Debian of its own, which it fills itself.
    assert asking == {"debian.sh", "bare_machine.sh"}


def test_a_namespace_for_ray_needs_no_program_of_a_package(machine):
    """Neither `ip` nor anything else that a minimal Debian lacks; a plain user gets as far as the kernel lets them."""
    (machine.folder / "unshare").symlink_to(shutil.which("unshare"))
    listen = "import socket; s = socket.create_server(('127.0.0.1', 0)); socket.create_connection(s.getsockname())"
    done = subprocess.run(
        [TOOLS / "ray" / "inside.sh", sys.executable, "-c", f"{listen}; print(socket.if_nameindex())"],
        env={"PATH": str(machine.folder), "PYTHON": sys.executable}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode == 77:
        assert done.stderr.startswith("Ray's cluster is left out: no namespaces here; remedy: ")
        pytest.skip(done.stderr.strip())
    assert (done.returncode, done.stdout) == (0, f"{[(1, 'lo')]}\n"), done.stderr
    assert socket.if_nameindex()


def test_without_unshare_ray_is_left_out_in_one_line(machine):
    words = [TOOLS / "ray" / "inside.sh", "true"]
    done = subprocess.run(words, env={"PATH": str(machine.folder)}, capture_output=True, text=True, check=False)
    assert done.returncode == 77
    assert done.stderr.count("\n") == 1
    assert "remedy: install " in done.stderr
