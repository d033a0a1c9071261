"""Commands in terminals of every width, without one, in languages without our signs, and with settings for others."""

import json
import os
import resource
import shlex
import signal
import subprocess
import sys

import pytest
from tests.support.surroundings import hearing, settle_variables

from pollux import backends, policies
from pollux.backends.dispatch import shim_client
from pollux.cli.commands.service import up
from pollux.cli.display.tables import WIDE_COLUMNS

ODD = "für größte → 漢字"
HISTORY = f'{{"format":"pollux-history"}}\n{{"a":"{ODD}"}}\n'.encode()


@pytest.fixture
def jobs(fake):
    reason = {"code": "waits", "at": 1.0, "text": f"waits for {ODD}", "next_step": ""}
    waits = fake.job("bert", state="queued", gpus=0, placement={}, goodput=None, eta=None, progress=None, reason=reason)
    fake.answers["GET", "/v1/jobs"] = {"jobs": [fake.job("resnet"), waits], "next": None}
    fake.answers["GET", "/v1/jobs/bert/explain"] = {"text": f"It waits for {ODD}.", "next_step": "", "jobs": []}
    fake.answers["GET", "/v1/status"] = fake.status
    fake.answers["GET", "/readyz"] = {"status": "ok"}
    fake.answers["GET", "/v1/history"] = HISTORY
    return fake


@pytest.mark.parametrize("width", [20, 40, 80, 160, 300])
def test_at_every_width_all_that_is_told_is_there(run, jobs, simulate, monkeypatch, width):
    """A terminal is what FORCE_COLOR says that there is."""
    monkeypatch.setattr(backends, "available", lambda name: "no engine: " + "install it, and " * 20)
    for name, value in {"FORCE_COLOR": "1", "NO_COLOR": "1", "COLUMNS": str(width)}.items():
        monkeypatch.setenv(name, value)
    for command, wanted in (
        (run("backends"), [*backends.names(), *" ".join(backends.summary(name) for name in backends.names()).split()]),
        (run("policies"), [*policies.names()]),
        (run("ls"), ["resnet", "running", "bert", "queued", "42%"]),
        (run("top", "--once"), ["resnet", "bert"]),
        (run("explain", "bert"), [f"It waits for {ODD}."]),
        (simulate("--policies", "fifo,las"), ["fifo", "las"]),
    ):
        assert command.exit_code == 0, command.output
        assert [word for word in wanted if word not in command.stdout] == []
    assert all(f"{name} does not work here: no engine: install it, and" in run("backends").stdout for name in ("ray",))
    assert ("batch" in run("ls").stdout) is (width >= WIDE_COLUMNS)


@pytest.mark.parametrize("variables", [{"TERM": "dumb"}, {"NO_COLOR": "1"}, {"COLUMNS": "20"}, {"COLUMNS": "none"}])
def test_what_is_no_terminal_gets_plain_and_whole_lines(run, jobs, monkeypatch, variables):
    plain = run("ls").stdout
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert run("ls").stdout == plain
    assert "\x1b" not in plain


LANGUAGES = {
    "none": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "ascii": {"PYTHONIOENCODING": "ascii"},
    "Latin-1": {"PYTHONIOENCODING": "latin-1"},
    "as everywhere": {"LC_ALL": "C"},
}
SEVERAL = """
import sys
from pollux.cli.main import main
for words in sys.argv[1:]:
    sys.argv = ["pollux", *words.split()]
    try:
        main()
    except SystemExit as end:
        assert not end.code, (words, end.code)
    print("end of", words)
"""


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_language_without_our_signs_is_no_error(jobs, language):
    words = ["ls", "ls --json", "explain bert", "top --once", "policies", "backends", "doctor", "config", "--help"]
    environ = {**os.environ, **LANGUAGES[language]}
    command = [sys.executable, "-c", SEVERAL, *words]
    done = subprocess.run(command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode("latin-1")
    parts = done.stdout.split(b"end of ")
    assert len(parts) == len(words) + 1
    document = json.loads(parts[1].partition(b"\n")[2])
    assert document["jobs"][1]["reason"]["text"] == f"waits for {ODD}", "JSON loses nothing"
    assert b"resnet" in parts[0]
    if language == "Latin-1":
        assert "It waits for für größte > \\u6f22\\u5b57.".encode("latin-1") in parts[2]


def test_signs_that_are_not_there_are_replaced_one_for_one(jobs):
    """Columns stay in line."""
    command = [sys.executable, "-m", "pollux", "ls"]
    plain, full = (
        subprocess.run(command, env={**os.environ, "PYTHONIOENCODING": encoding}, capture_output=True, check=True)
        for encoding in ("ascii", "utf-8")
    )
    lines = plain.stdout.decode("ascii").splitlines(), full.stdout.decode("utf-8").splitlines()
    assert [len(line) for line in lines[0][:3]] == [len(line) for line in lines[1][:3]]
    assert "11min-22min" in plain.stdout.decode("ascii")
    assert "8>4" in plain.stdout.decode("ascii")


def test_a_folder_whose_name_is_no_text_is_named_by_its_bytes(tmp_path):
    home = os.fsencode(tmp_path) + b"/f\xfcr"
    environ = {**os.environb, b"POLLUX_HOME": home}
    command = [sys.executable, "-m", "pollux", "config"]
    assert home in subprocess.run(command, env=environ, capture_output=True, check=True).stdout
    told = subprocess.run([*command, "--json"], env=environ, capture_output=True, check=True).stdout
    assert json.loads(told)["settings"][0]["value"] == os.fsdecode(home)


def test_the_service_is_asked_directly_whatever_proxy_there_is(run, jobs, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    assert "resnet" in run("ls").stdout


@pytest.mark.parametrize("streams", ["<&-", ">&-", "<&- >&- 2>&-"])
def test_without_input_or_output_it_does_what_it_is_told(jobs, streams):
    words = ["ls", "top", "policies", "history export", "ls --json"]
    command = shlex.join([sys.executable, "-c", SEVERAL, *words])
    assert subprocess.run(["sh", "-c", f"{command} {streams}"], check=False).returncode == 0


def test_a_history_is_utf_8_in_every_language(jobs):
    command = [sys.executable, "-m", "pollux", "history", "export"]
    environ = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    assert subprocess.run(command, env=environ, capture_output=True, check=True).stdout == HISTORY


MASK = "import signal; print(sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())), flush=True)"


def test_what_runs_on_in_the_background_has_no_signal_blocked(tmp_path):
    """Services and jobs are stopped by signals."""
    (tmp_path / "mask.py").write_text(MASK)
    outputs = [tmp_path / "service", tmp_path / "job"]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    try:
        with outputs[0].open("wb") as file:
            service = up._spawn([sys.executable, "-c", MASK], file.fileno())
        job = shim_client._spawn("mask", [], [], outputs[1], {**os.environ, "PYTHONPATH": str(tmp_path)})
        for pid in (service, job):
            assert os.waitpid(pid, 0)[1] == 0
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert [output.read_text() for output in outputs] == ["[]\n", "[]\n"]


@pytest.mark.parametrize("heard", [False, True])
def test_a_process_that_a_test_starts_hears_what_the_test_run_ignores(heard):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    code = "import signal; print(signal.getsignal(signal.SIGHUP) == signal.SIG_DFL)"
    try:
        with hearing(*[signal.SIGHUP] * heard):
            told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert told == f"{heard}\n"


def test_tests_take_nothing_from_who_runs_them_but_what_is_meant_for_them(tmp_path):
    kept = {"POLLUX_OSDI21_DATA": "/data", "CUDA_VISIBLE_DEVICES": "3", "PATH": "/bin", "HOME": str(tmp_path)}
    others = [
        "POLLUX_HOME", "SLURM_JOB_ID", "RAY_ADDRESS", "RANK", "COLUMNS", "FORCE_COLOR", "LC_ALL", "HTTPS_PROXY",
        "PYTHONOPTIMIZE", "PYTEST_ADDOPTS", "MPLBACKEND", "MPLCONFIGDIR", "XDG_CACHE_HOME",
    ]  # fmt: skip
    environ = kept | dict.fromkeys(others, "7")
    settle_variables(environ)
    assert environ == kept | {"LANG": "C.UTF-8", "TERM": "xterm"}


def test_tests_have_as_many_open_files_as_they_need_or_may_have():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft == resource.RLIM_INFINITY or soft >= (4096 if hard == resource.RLIM_INFINITY else min(hard, 4096))


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", ["policies", "policies --json", "--version", "simulate --help"])
def test_a_full_disk_behind_its_output_is_told_in_one_line(words, unbuffered):
    command = f"{shlex.quote(sys.executable)} -m pollux {words} > /dev/full"
    done = subprocess.run(
        ["sh", "-c", command], env=os.environ | {"PYTHONUNBUFFERED": unbuffered}, stderr=subprocess.PIPE, text=True
    )
    assert done.returncode == 1
    assert done.stderr == (
        "error: cannot write to standard output: No space left on device; the output is not complete\n"
    )


def test_a_reader_that_has_gone_is_no_error_to_be_told():
    command = f"{shlex.quote(sys.executable)} -m pollux policies | true"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True)
    assert done.stderr == ""
