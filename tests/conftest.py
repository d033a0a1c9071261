"""What every test shares: hypothesis profiles, the published data, replicas, and "a skip is a failure" in CI."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import settings

from pollux.testing.training import ReplicaServer

REPOSITORY = Path(__file__).resolve().parent.parent

settings.register_profile("deterministic", derandomize=True, deadline=None)
settings.register_profile("explore", derandomize=False, deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "deterministic"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--events", type=int, help="kills, stops and the like in each test of tests/faults")
    parser.addoption("--seed", type=int, help="the seed of their moments")


def pytest_configure(config: pytest.Config) -> None:
    # Read when the test modules are imported, and by the processes that they start.
    for option, name in (("events", "POLLUX_FAULT_EVENTS"), ("seed", "POLLUX_FAULT_SEED")):
        value = config.getoption(option)
        if value is not None:
            os.environ[name] = str(value)


# These watch processes on a machine that may be busy: one that fails is tried once more, and named as such.
_BY_THE_CLOCK = ("browser", "conformance", "faults", "integration")
_APART = {"tests/integration/ray": "ray", "tests/integration/slurm": "slurm", "tests/browser": "browser"}


def pytest_itemcollected(item: pytest.Item) -> None:
    """What needs a cluster or a browser is run by a target of its own; see the Makefile."""
    for folder, mark in _APART.items():
        if item.path.is_relative_to(REPOSITORY / folder):
            item.add_marker(mark)
    if any(item.path.is_relative_to(REPOSITORY / "tests" / folder) for folder in _BY_THE_CLOCK):
        item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.fixture(scope="session")
def osdi21_data() -> Path:
    """The published OSDI'21 measurements and workloads, read in place."""
    folder = Path(os.environ.get("POLLUX_OSDI21_DATA", REPOSITORY.parent / "shared" / "data" / "osdi21"))
    if not folder.is_dir():
        pytest.skip(f"the OSDI'21 data is not at {folder}; set POLLUX_OSDI21_DATA to its folder")
    return folder


@pytest.fixture(scope="session")
def replica_server() -> Iterator[ReplicaServer]:
    """Starts training replicas in milliseconds; one for all tests of a process."""
    with ReplicaServer() as server:
        yield server


def _forbidden_skips(config: pytest.Config) -> Sequence[pytest.TestReport | pytest.CollectReport]:
    """The skips that count as failures; none in an xdist worker, since the main process sees them all."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") != "true" or hasattr(config, "workerinput") or reporter is None:
        return []
    return list(reporter.stats.get("skipped", []))


def pytest_sessionfinish(session: pytest.Session) -> None:
    passing = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    if session.exitstatus in passing and _forbidden_skips(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    skips = _forbidden_skips(config)
    if not skips:
        return
    terminalreporter.section("skipped, which CI=true counts as failed", red=True)
    for report in skips:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        terminalreporter.line(f"{report.nodeid}: {reason}")
