"""What every test shares: surroundings, hypothesis, seeds, replicas, what is tried again, skips that fail in CI."""

import codecs
import json
import locale
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import settings
from tests.support.hosted_store import HostedStore
from tests.support.surroundings import settle

from pollux.backends.process import proc
from pollux.testing.jobs.replica_server import ReplicaServer
from pollux.testing.waiting import OutOfTime

REPOSITORY = Path(__file__).resolve().parent.parent

settle()

settings.register_profile("deterministic", derandomize=True, deadline=None, max_examples=40)
settings.register_profile("explore", derandomize=False, deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "deterministic"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--events", type=int, help="kills, stops and the like in each test of tests/faults")
    parser.addoption("--seed", type=int, help="the seed of their moments")


_BEGUN = pytest.StashKey[float]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_BEGUN] = time.time()
    # Workers are started with the language that `settle` has set; this process has had its own since its first line.
    encoding = locale.getpreferredencoding(False)
    if codecs.lookup(encoding).name != "utf-8" and not config.getoption("numprocesses", None):
        raise pytest.UsageError(f"texts are {encoding} in this shell: set PYTHONUTF8=1, or use -n 2")
    # Read when the test modules are imported, and by the processes that they start.
    for option, name in (("events", "POLLUX_FAULT_EVENTS"), ("seed", "POLLUX_FAULT_SEED")):
        value = config.getoption(option)
        if value is not None:
            os.environ[name] = str(value)


# These watch processes on a machine that may be busy. One that waited for something in vain is tried once more, and
# named as such; one whose answers, data or states were wrong has failed.
_BY_THE_CLOCK = ("browser", "conformance", "faults", "integration")
_WAITING = (OutOfTime, TimeoutError, subprocess.TimeoutExpired)
_ERRORS = pytest.StashKey[list[BaseException]]()
_SEEDED = (
    "faults",
    "integration/service/test_random_sequences.py",
    "integration/service/test_schema.py",
)
_APART = {"tests/integration/ray": "ray", "tests/integration/slurm": "slurm", "tests/browser": "browser"}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Folders whose mark the expression leaves out are not imported: a driver of browsers takes seconds everywhere."""
    left_out = {place for place, mark in _APART.items() if f"not {mark}" in config.getoption("markexpr")}
    return True if any(collection_path == REPOSITORY / place for place in left_out) else None


def pytest_itemcollected(item: pytest.Item) -> None:
    """What needs a cluster or a browser is run by a target of its own; see the Makefile."""
    for folder, mark in _APART.items():
        if item.path.is_relative_to(REPOSITORY / folder):
            item.add_marker(mark)
    by_the_clock = any(item.path.is_relative_to(REPOSITORY / "tests" / folder) for folder in _BY_THE_CLOCK)
    if os.environ.get("CI") == "true" and not item.path.is_relative_to(REPOSITORY / "tests" / "faults"):
        # A net: a race is a defect, but it shall not keep a change out. What was tried again is told with its error.
        item.add_marker(pytest.mark.flaky(reruns=1))
    elif by_the_clock:
        # Names would match an error by another one that was handled when it came, and in one phase of the test alone.
        only = [f"^{kind.__name__}: " for kind in _WAITING]
        item.add_marker(pytest.mark.flaky(reruns=1, only_rerun=only, condition=lambda: only_waited_in_vain(item)))


def only_waited_in_vain(item: pytest.Item) -> bool:
    """Whether nothing else went wrong in this test than that something did not come about in time."""
    return all(isinstance(error, _WAITING) or _is_of_the_browser(error) for error in item.stash.get(_ERRORS, []))


def _is_of_the_browser(error: BaseException) -> bool:
    kind = type(error)
    return kind.__module__.startswith("playwright.") and kind.__name__ == "TimeoutError"


def _seed(item: pytest.Item) -> str:
    """The seed and the number of events of a test of faults, of its module's `SEED` and `EVENTS`; empty for others."""
    if not any(item.path.is_relative_to(REPOSITORY / "tests" / place) for place in _SEEDED):
        return ""
    module = item.getparent(pytest.Module)
    seed, events = (getattr(module.obj if module else None, name, None) for name in ("SEED", "EVENTS"))
    if seed is None:
        return ""
    return f"seed {seed}" if events is None else f"seed {seed}, {events} events"


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep what went wrong. Seeds travel with reports: the output of tests that pass, and of workers, is not shown.

    What is missing is told once: the place of a skip is the fixture that found it, which all tests that need it share.
    """
    report = yield
    if report.skipped and report.when == "setup" and call.excinfo is not None and isinstance(report.longrepr, tuple):
        asked = [frame for frame in call.excinfo.traceback if frame.path.is_relative_to(item.config.rootpath)]
        if asked:
            report.longrepr = (str(asked[-1].path), asked[-1].lineno + 1, report.longrepr[2])
    if report.when == "setup":
        item.stash[_ERRORS] = []
    if report.failed and call.excinfo is not None:
        item.stash[_ERRORS].append(call.excinfo.value)
    told = _seed(item)
    if told and report.when == "call":
        report.user_properties.append(("seed", told))
    if told and report.failed:
        report.sections.append(("seed", f"{told}; --seed and --events give the same moments again"))
    _make_writable(report)
    return report


def _make_writable(report: pytest.TestReport) -> None:
    """Text that is no Unicode, such as a fuzzed line in a failure, would end the worker that sends the report."""
    report.sections = [(_writable(title), _writable(text)) for title, text in report.sections]
    text = report.longreprtext
    if _writable(text) != text:
        report.longrepr = _writable(text)


def _writable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


_DATA = Path(os.environ.get("POLLUX_OSDI21_DATA", REPOSITORY.parent / "shared" / "data" / "osdi21"))
_WITHOUT_DATA = pytest.StashKey[int]()


@pytest.fixture(scope="session")
def osdi21_data() -> Path:
    """The published OSDI'21 measurements and workloads, read in place."""
    if not _DATA.is_dir():
        pytest.skip(f"the published OSDI'21 data is not at {_DATA}; set POLLUX_OSDI21_DATA to its folder")
    return _DATA


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs the published data where it is absent. In CI those tests are skipped, and so fail."""
    if _DATA.is_dir() or os.environ.get("CI") == "true":
        return
    without = [item for item in items if "osdi21_data" in getattr(item, "fixturenames", ())]
    if without:
        items[:] = [item for item in items if item not in set(without)]
        config.hook.pytest_deselected(items=without)
    config.stash[_WITHOUT_DATA] = len(without)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    """An xdist worker has ended: all of them left out the same tests."""
    told = getattr(node, "workeroutput", {}).get("without_data")
    if told is not None:
        node.config.stash[_WITHOUT_DATA] = told


@pytest.fixture(scope="session")
def replica_server() -> Iterator[ReplicaServer]:
    """Starts training replicas in milliseconds; one for all tests of a process."""
    with ReplicaServer() as server:
        yield server


@pytest.fixture(autouse=True)
def _children_of_the_run_are_spared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shims and daemons end all children of their process. In a test of their parts these are other tests' servers."""
    test_run, kill_all = os.getpid(), proc.kill_all

    def checked(pids: Iterable[int], number: int = signal.SIGKILL) -> None:
        pids = list(pids)
        if os.getpid() == test_run:
            table = proc.process_table()
            ours = [table[pid].pid for pid in pids if pid in table and table[pid].parent == test_run]
            others = [pid for pid in ours if b"pollux.testing" in Path(f"/proc/{pid}/cmdline").read_bytes()]
            assert not others, f"this test would end {others}, which other tests use: see LocalLauncher(spared=...)"
        kill_all(pids, number)

    monkeypatch.setattr(proc, "kill_all", checked)


@pytest.fixture
def hosted_store(tmp_path: Path) -> Iterator[HostedStore]:
    """The host of a job's store, which tells whom it refused in `store.log`."""
    store = HostedStore(tmp_path / "store.log")
    yield store
    store.close()


def _forbidden_skips(config: pytest.Config) -> Sequence[pytest.TestReport | pytest.CollectReport]:
    """The skips that count as failures; none in an xdist worker, since the main process sees them all."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") != "true" or hasattr(config, "workerinput") or reporter is None:
        return []
    return list(reporter.stats.get("skipped", []))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["without_data"] = session.config.stash.get(_WITHOUT_DATA, 0)
    passing = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    if session.exitstatus in passing and _forbidden_skips(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_report_header(config: pytest.Config) -> str:
    seed = config.getoption("seed")
    return f"seed of faults: {'each test has its own' if seed is None else seed}, named at the end"


def _tell_seeds(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for found in terminalreporter.stats.values() for report in found]
    seeds = {(r.nodeid, told) for r in reports for name, told in getattr(r, "user_properties", ()) if name == "seed"}
    if seeds:
        terminalreporter.section("seeds")
    for nodeid, told in sorted(seeds):
        terminalreporter.line(f"{nodeid}: {told}")


def _tell_left_out(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    count = config.stash.get(_WITHOUT_DATA, 0)
    if count:
        terminalreporter.section("left out")
        terminalreporter.line(
            f"{count} tests of published results: their data is not at {_DATA}; "
            "set POLLUX_OSDI21_DATA to the folder that has it"
        )


def _tell_tried_again(terminalreporter: pytest.TerminalReporter) -> None:
    """What failed and then passed, with its error: a race that somebody must repair."""
    again = terminalreporter.stats.get("rerun", [])
    if again:
        terminalreporter.section("tried again: each is a race, to be repaired", yellow=True)
    for report in again:
        crash = getattr(report.longrepr, "reprcrash", None)
        terminalreporter.line(f"{report.nodeid} ({report.when}): {crash.message if crash else report.longrepr}")


def _record(terminalreporter: pytest.TerminalReporter, config: pytest.Config, exitstatus: int) -> None:
    """Append what became of this run to the file that POLLUX_TEST_RECORD names; `make test-loaded` reads it."""
    path = os.environ.get("POLLUX_TEST_RECORD")
    if not path or hasattr(config, "workerinput"):
        return
    stats = terminalreporter.stats
    names = {kind: sorted(report.nodeid for report in stats.get(kind, [])) for kind in ("failed", "error", "rerun")}
    counts = {kind: len(stats.get(kind, [])) for kind in ("passed", "skipped")}
    line = {
        "tests": config.getoption("markexpr"),
        "exit": int(exitstatus),
        **counts,
        **names,
        "seconds": round(time.time() - config.stash[_BEGUN]),
    }
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config) -> None:
    _tell_seeds(terminalreporter)
    _tell_tried_again(terminalreporter)
    _tell_left_out(terminalreporter, config)
    _record(terminalreporter, config, exitstatus)
    skips = _forbidden_skips(config)
    if not skips:
        return
    terminalreporter.section("skipped, which CI=true counts as failed", red=True)
    reasons = [report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr) for report in skips]
    for reason, count in Counter(reasons).items():
        first = skips[reasons.index(reason)].nodeid
        terminalreporter.line(f"{first}{f' and {count - 1} more' if count > 1 else ''}: {reason}")
