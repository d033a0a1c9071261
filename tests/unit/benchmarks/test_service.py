"""What the service's benchmark says about decisions with and without open pages, and how it asks."""

import asyncio
import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

FOLDER = Path(__file__).parents[3] / "benchmarks"


def test_decisions_are_compared_in_the_median_and_at_p99(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(FOLDER))
    service = importlib.import_module("service")
    alone = [f"{at} 0.010 0.020" for at in range(100)]
    # One that was begun late was thought about quickly: both times count together, of one decision at a time.
    among = [f"{at} 0.010 0.030" for at in range(100, 198)] + ["198 0.400 0.001", "199 0.400 0.001"]
    (tmp_path / "decisions.txt").write_text("\n".join(alone + among))
    result = service.decisions(tmp_path, [100.0, 200.0]) | service.decisions(tmp_path, [0.0, 100.0], "alone_")
    assert result["decision_due_p50_ms"] == pytest.approx(40.0)
    assert result["decision_due_p99_ms"] == pytest.approx(401.0)
    found = service.compared(result)
    assert found == {"decisions_ratio": 1.0, "decision_later_ms": 10.0, "decision_later_p99_ms": 371.0}
    names = importlib.import_module("run_all").BESIDE
    told = {name: figure({"service_viewers": found}) for name, figure in names.items()}
    assert told == {"viewers_decision_later_p50_ms": 10.0, "viewers_decision_later_p99_ms": 371.0}


def test_agents_report_with_their_jobs_token_over_a_connection_each(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    service = importlib.import_module("service")
    opened, closed, now = [], [], [0.0]

    class Client:
        def __init__(self, port: int, token: str) -> None:
            opened.append(token)

        async def ask(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
            assert (method, path) == ("POST", "/v1/jobs/job-7/reports")
            return 200, b"{}"

        def close(self) -> None:
            closed.append(True)

    async def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(service, "Client", Client)
    monkeypatch.setattr(service, "asyncio", SimpleNamespace(sleep=sleep, IncompleteReadError=EOFError))
    monkeypatch.setattr(service, "time", SimpleNamespace(monotonic=lambda: now[0], perf_counter=lambda: now[0]))
    load = service.Load(1, "operator", 1, 1)
    asyncio.run(load.agent(7, 100.0))
    assert len(opened) == len(closed) == len(load.took["report"]) >= 3
    assert set(opened) == {service.Tokens("operator", service.SECRET).for_job("job-7")}
    assert load.errors == 0


def test_a_family_has_children_and_theirs(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    service = importlib.import_module("service")
    command = [sys.executable, "-c", "import subprocess; subprocess.run(['sleep', '60'])"]
    with subprocess.Popen(command, start_new_session=True) as child:
        try:
            service.waited(lambda: len(service.family(child.pid)) == 2, "no child of a child")
            assert service.family(os.getpid())[0] == os.getpid()
            assert set(service.family(child.pid)) < set(service.family(os.getpid()))
        finally:
            os.killpg(child.pid, signal.SIGKILL)


def test_a_figure_without_a_bar_is_neither_met_nor_missed(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    run_all = importlib.import_module("run_all")
    assert [run_all.verdict(*each) for each in ((1.0, 2.0, True), (1.0, 2.0, False), (None, 2.0, True))] == [
        "met",
        "MISSED",
        "not run",
    ]
    assert run_all.verdict(1.0, None, True) == ""
    without = [claim for claim, bar, _, _ in run_all.CLAIMS if bar is None]
    assert any("bare" in claim for claim in without)
