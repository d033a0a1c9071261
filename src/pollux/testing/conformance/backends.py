"""Tests that every backend must pass; its author inherits them.

    class TestMine(BackendConformance):
        @classmethod
        def backend(cls, home: Path) -> Backend:
            return Mine(home)

Jobs are small Python scripts, which need only the interpreter that runs the tests.
"""

from __future__ import annotations

import json
import textwrap
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pollux.backends.protocol import (
    Backend,
    BackendEvent,
    Launch,
    ReplicasEnded,
    ReplicasStarted,
    Running,
)
from pollux.core import Placement
from pollux.core.errors import BackendFailed, InvalidInput
from pollux.testing.waiting import PATIENCE_SECONDS, OutOfTime

__all__ = ["BackendConformance", "Bench"]


class Bench:
    """A backend in a folder, its events so far, and small jobs for it. `new` makes a backend for a home."""

    def __init__(self, folder: Path, new: Callable[[Path], Backend]) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.home.mkdir()
        self.told: list[BackendEvent] = []
        self._new = new
        self._changed = threading.Condition()
        self.backend = self._begin()

    def _begin(self) -> Backend:
        backend = self._new(self.home)
        backend.start(self._hear)
        return backend

    def _hear(self, event: BackendEvent) -> None:
        with self._changed:
            self.told.append(event)
            self._changed.notify_all()

    def restart(self) -> None:
        """Close the backend and start another at the same home."""
        self.backend.close()
        self.told.clear()
        self.backend = self._begin()

    def script(self, name: str, text: str) -> str:
        """Write a Python file into the jobs' folder."""
        (self.folder / f"{name}.py").write_text(textwrap.dedent(text))
        return f"{name}.py"

    def launch(self, job_id: str, text: str, generation: int = 1, gpus: int = 1, **more: Any) -> Launch:
        """A launch of a script of that text, in the jobs' folder."""
        node = self.wait("node", self.backend.inventory)[0].id
        argv = ("python", self.script(f"{job_id}_script", text), *more.pop("arguments", ()))
        given: dict[str, Any] = {"argv": argv, "workdir": str(self.folder), "grace_seconds": 20.0, **more}
        return Launch(job_id, generation, Placement.of({node: gpus}), **given)

    def submit(self, job_id: str, text: str, generation: int = 1, gpus: int = 1, **more: Any) -> Launch:
        """Launch a script of that text."""
        launch = self.launch(job_id, text, generation, gpus, **more)
        self.backend.submit(launch)
        return launch

    def wait(self, what: str, is_so: Callable[[], Any], seconds: float = PATIENCE_SECONDS) -> Any:
        """The first true value of `is_so`; `OutOfTime` if that takes too long."""
        deadline = time.monotonic() + seconds
        while True:
            found = is_so()
            if found:
                return found
            if time.monotonic() > deadline:
                raise OutOfTime(f"no {what} after {seconds:g} s; told: {self.told}; {self.backend.running()}")
            with self._changed:
                self._changed.wait(0.02)

    def starts(self, job_id: str) -> list[ReplicasStarted]:
        """The events so far about the starts of a job's generations."""
        return [event for event in self.told if isinstance(event, ReplicasStarted) and event.job_id == job_id]

    def ends(self, job_id: str, generation: int = 1) -> list[ReplicasEnded]:
        """The events so far about the end of a generation."""
        told = [event for event in self.told if isinstance(event, ReplicasEnded)]
        return [event for event in told if (event.job_id, event.generation) == (job_id, generation)]

    def end(self, job_id: str, generation: int = 1) -> ReplicasEnded:
        """The event of a generation's end, waited for."""
        found: list[ReplicasEnded] = self.wait(f"end of {job_id}", lambda: self.ends(job_id, generation))
        return found[0]

    def file(self, name: str) -> str:
        """The text of a file in the jobs' folder, waited for; a text is complete with its line break."""
        path = self.folder / name

        def whole() -> str:
            text = path.read_text() if path.exists() else ""
            return text if text.endswith("\n") else ""

        return str(self.wait(f"file {name}", whole))

    def running(self, job_id: str) -> Running | None:
        """The backend's entry for that job."""
        return next((each for each in self.backend.running() if each.job_id == job_id), None)

    def log(self, job_id: str, replica: int = 0) -> str:
        """The log of a replica so far, read piece by piece."""
        text, offset, at_end = "", 0, False
        while not at_end:
            chunk = self.backend.logs(job_id, replica, offset, 1000)
            text, offset, at_end = text + chunk.text, chunk.offset, chunk.at_end
        return text


_UNTIL_TOLD = """
    import os, signal, sys, time
    from pathlib import Path
    me = os.environ["POLLUX_JOB"]
    def told(number, frame):
        Path(f"{me}.told").write_text("SIGTERM\\n")
        sys.exit(128 + number)
    signal.signal(signal.SIGTERM, told)
    Path(f"{me}.up").write_text("yes\\n")
    time.sleep(600)
"""

_UNTIL_FILE = """
    import os, time
    from pathlib import Path
    me = os.environ["POLLUX_JOB"]
    Path(f"{me}.up").write_text("yes\\n")
    while not Path(f"{me}.go").exists():
        time.sleep(0.01)
"""


def _named(job_id: str, **more: Any) -> dict[str, Any]:
    return {"env": {"POLLUX_JOB": job_id}, **more}


class BackendConformance(ABC):
    """Inherit, and define `backend`; it needs at least three slots.

    `parallel`: the backend runs jobs of several replicas, and several jobs at a time. `separate`: replicas are separate
    processes, which get signals and go on without the backend's object.
    """

    parallel = True
    separate = True

    @classmethod
    @abstractmethod
    def backend(cls, home: Path) -> Backend:
        """A new backend with that home, not started yet."""

    @classmethod
    def is_ready(cls, backend: Backend) -> bool:
        """Whether tests may begin; called until it is true."""
        return bool(backend.inventory())

    @pytest.fixture(scope="class")
    @classmethod
    def bench(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
        """A bench for all tests of a class, which use different jobs."""
        bench = Bench(tmp_path_factory.mktemp("bench"), cls.backend)
        bench.wait("ready backend", lambda: cls.is_ready(bench.backend))
        yield bench
        _clear(bench)

    @pytest.fixture
    def own_bench(self, tmp_path: Path) -> Iterator[Bench]:
        """A bench for one test, which may restart it or fill its slots."""
        bench = Bench(tmp_path, self.backend)
        bench.wait("node", bench.backend.inventory)
        yield bench
        _clear(bench)

    # What it offers

    def test_it_says_what_there_is(self, bench: Bench) -> None:
        """Nodes with different names, and at least three slots together."""
        nodes = bench.backend.inventory()
        assert nodes
        assert len({node.id for node in nodes}) == len(nodes)
        assert sum(node.num_gpus for node in nodes) >= 3

    def test_it_declares_what_it_can(self, bench: Bench) -> None:
        """Every declared property has a value of the right type, its own or the default."""
        backend = bench.backend
        assert all(isinstance(said, str) for said in backend.warnings())
        assert backend.head is None or backend.head == type(backend).head_of({"head": backend.head})
        for number in (backend.notice_seconds, backend.taken_back_seconds, backend.false_alarms):
            assert number is None or number >= 0

    # One job

    def test_a_job_runs_to_its_end(self, bench: Bench) -> None:
        """The events of its start and its end come in order; the entry stays until it is forgotten."""
        before = time.time()
        bench.submit("plain", "print('done')", **_named("plain"))
        ended = bench.end("plain")
        assert (ended.outcome, [(each.replica, each.code) for each in ended.exits]) == ("succeeded", [(0, 0)])
        assert before - 1 <= ended.exits[0].at <= ended.at + 1
        assert bench.running("plain") == Running("plain", 1, "ended", ended)
        ran = bench.backend.ran_seconds("plain", 1)
        assert ran == bench.backend.ran_seconds("plain", 1), "run time ends with the job"
        started = bench.starts("plain")
        assert [event.generation for event in started] == [1]
        assert bench.told.index(started[0]) < bench.told.index(ended)
        bench.backend.forget("plain")
        bench.wait("forgetting", lambda: bench.running("plain") is None)
        assert bench.log("plain") == "done\n"

    def test_submitting_twice_starts_once(self, bench: Bench) -> None:
        """A second submission changes nothing, before and after the job's end."""
        text = _UNTIL_FILE + "    print('ran')\n"
        launch = bench.submit("twice", text, **_named("twice"))
        bench.backend.submit(launch)
        bench.file("twice.up")
        bench.backend.submit(launch)
        (bench.folder / "twice.go").touch()
        bench.end("twice")
        bench.backend.submit(launch)
        bench.submit("afterwards", "print('x')", **_named("afterwards"))
        bench.end("afterwards")
        assert bench.log("twice") == "ran\n"
        assert len(bench.ends("twice")) == 1

    def test_arguments_folder_and_variables_reach_the_script(self, bench: Bench) -> None:
        """They arrive unchanged, with torchrun's variables added."""
        text = """
            import json, os, sys
            print(json.dumps([sys.argv, os.getcwd(), dict(os.environ)]))
        """
        bench.submit("given", text, arguments=("--rate", "a b", ""), **_named("given"))
        assert bench.end("given").outcome == "succeeded"
        argv, folder, variables = json.loads(bench.log("given"))
        assert argv[1:] == ["--rate", "a b", ""]
        assert folder == str(bench.folder)
        wanted = {"POLLUX_JOB": "given", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        assert {name: variables.get(name) for name in wanted} == wanted
        assert variables["MASTER_ADDR"] == "127.0.0.1"
        assert 0 < int(variables["MASTER_PORT"]) < 65536

    @pytest.mark.parametrize(
        ("ending", "code"),
        [("raise ValueError('bad rate')", 1), ("import sys; sys.exit(7)", 7), ("raise SystemExit('no data')", 1)],
        ids=["exception", "code", "message"],
    )
    def test_a_failure_is_told_with_its_last_words(self, bench: Bench, ending: str, code: int) -> None:
        """The detail has the exit code and the line with the error."""
        job = f"failing-{code}-{len(ending)}"
        bench.submit(job, f"print('step 1')\n{ending}\n", **_named(job))
        ended = bench.end(job)
        assert (ended.outcome, ended.exits[0].code) == ("crashed", code)
        last = {"exception": "ValueError: bad rate", "message": "no data", "code": "step 1"}
        expected = next(words for key, words in last.items() if words.split()[-1] in ending or key == "code")
        assert expected in ended.detail
        assert f"exit code {code}" in ended.detail
        assert "\n" not in ended.detail

    def test_a_script_out_of_memory_is_told_apart(self, bench: Bench) -> None:
        """The exception that PyTorch or Python ends with shows it."""
        bench.submit("hungry", "raise MemoryError('no room')", **_named("hungry"))
        assert bench.end("hungry").outcome == "out-of-memory"

    # Stopping

    def test_a_job_is_told_to_stop(self, bench: Bench) -> None:
        """It gets SIGTERM; if it then does not succeed, it counts as stopped, not as crashed."""
        if not self.separate:
            return
        bench.submit("stopped", _UNTIL_TOLD, **_named("stopped"))
        bench.file("stopped.up")
        bench.backend.stop("stopped", 1, 30.0)
        ended = bench.end("stopped")
        assert ended.outcome == "stopped"
        assert bench.file("stopped.told") == "SIGTERM\n"
        bench.backend.stop("stopped", 1, 30.0)
        assert len(bench.ends("stopped")) == 1

    def test_a_job_that_waits_in_python_can_be_stopped(self, bench: Bench) -> None:
        """The backend may use any means."""
        text = _UNTIL_FILE
        bench.submit("looping", text, **_named("looping"))
        bench.file("looping.up")
        bench.backend.stop("looping", 1, 30.0)
        assert bench.end("looping").outcome == "stopped"

    def test_one_that_does_not_listen_is_killed_after_its_grace(self, bench: Bench) -> None:
        """It gets SIGKILL once the grace is over."""
        if not self.separate:
            return
        text = """
            import os, signal, time
            from pathlib import Path
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            Path("deaf.up").write_text("yes\\n")
            time.sleep(600)
        """
        bench.submit("deaf", text, **_named("deaf"))
        bench.file("deaf.up")
        bench.backend.stop("deaf", 1, 0.2)
        ended = bench.end("deaf")
        assert (ended.outcome, ended.exits[0].code) == ("stopped", -9)

    def test_stopping_ends_earlier_generations_only(self, bench: Bench) -> None:
        """A stop of generation 1 leaves generation 2 alone."""
        bench.submit("later", _UNTIL_FILE, generation=2, **_named("later"))
        bench.file("later.up")
        bench.backend.stop("later", 1, 0.0)
        (bench.folder / "later.go").touch()
        assert bench.end("later", 2).outcome == "succeeded"

    def test_a_running_job_is_brought_to_another_generation(self, bench: Bench) -> None:
        """A resize starts the replicas of the new generation; a second one of the same generation changes nothing."""
        gpus = 2 if self.parallel else 1
        text = """
            import os, time
            from pathlib import Path
            me, generation = os.environ["POLLUX_JOB"], os.environ["POLLUX_GENERATION"]
            Path(f"{me}.up-{generation}").write_text(os.environ["WORLD_SIZE"] + "\\n")
            while not Path(f"{me}.go").exists():
                time.sleep(0.01)
        """

        def launch(generation: int, count: int) -> Launch:
            variables = {"POLLUX_JOB": "changed", "POLLUX_GENERATION": str(generation)}
            return bench.launch("changed", text, generation, count, env=variables)

        bench.backend.submit(launch(1, 1))
        assert bench.file("changed.up-1") == "1\n"
        bench.backend.resize(launch(2, gpus))
        assert bench.file("changed.up-2") == f"{gpus}\n"
        bench.backend.resize(launch(2, 1))
        bench.backend.resize(launch(1, 1))
        (bench.folder / "changed.go").touch()
        ended = bench.end("changed", 2)
        assert (ended.outcome, len(ended.exits)) == ("succeeded", gpus)
        assert [event.generation for event in bench.starts("changed")] == [1, 2]

    def test_unknown_jobs_are_no_error(self, bench: Bench) -> None:
        """Stop and forget do nothing; the log is empty."""
        bench.backend.stop("nobody", 3, 1.0)
        bench.backend.forget("nobody")
        chunk = bench.backend.logs("nobody", 0)
        assert (chunk.text, chunk.at_end) == ("", True)
        assert bench.running("nobody") is None

    # Refusals

    def test_what_does_not_fit_is_refused(self, bench: Bench) -> None:
        """An unknown node, too many GPUs, an id that cannot name a folder; no entry is kept."""
        there = bench.backend.inventory()[0]
        for placement in (Placement.of({"elsewhere": 1}), Placement.of({there.id: there.num_gpus + 1})):
            with pytest.raises(BackendFailed, match="cannot be placed"):
                bench.backend.submit(Launch("misfit", 1, placement, ("python", "x.py"), str(bench.folder)))
        for name in ("../up", "a/b", "", ".hidden", "x" * 200):
            with pytest.raises(InvalidInput):
                bench.backend.submit(
                    Launch(name, 1, Placement.of({there.id: 1}), ("python", "x.py"), str(bench.folder))
                )
            with pytest.raises(InvalidInput):
                bench.backend.logs(name)
        assert bench.running("misfit") is None

    def test_a_folder_or_script_that_is_not_there_ends_the_job(self, bench: Bench) -> None:
        """It ends as a crash; the detail names the folder or script."""
        node = bench.backend.inventory()[0].id
        for job, script, folder in (
            ("no-script", "absent.py", str(bench.folder)),
            ("no-folder", "x.py", "/absent/dir"),
        ):
            bench.backend.submit(Launch(job, 1, Placement.of({node: 1}), ("python", script), folder))
            ended = bench.end(job)
            assert ended.outcome == "crashed"
            assert "absent" in ended.detail

    # Logs

    def test_logs_are_read_from_an_offset(self, bench: Bench) -> None:
        """Pieces of any size give every byte once; a negative offset counts from the end."""
        text = """
            import sys
            for number in range(300):
                print(f"línea {number}")
            print("to stderr", file=sys.stderr)
        """
        bench.submit("writer", text, **_named("writer"))
        bench.end("writer")
        whole = bench.log("writer")
        assert whole.splitlines()[:2] == ["línea 0", "línea 1"]
        assert "to stderr" in whole
        end = bench.backend.logs("writer", 0, 0, 1 << 20).offset
        assert end == len(whole.encode())
        assert bench.backend.logs("writer", 0, -20).text == whole.encode()[-20:].decode()
        assert bench.backend.logs("writer", 0, end).text == ""
        pieces, offset = [], 0
        while not (chunk := bench.backend.logs("writer", 0, offset, 7)).at_end:
            pieces.append(chunk.text)
            offset = chunk.offset
        assert "".join(pieces) + chunk.text == whole

    # Several replicas, several jobs

    def test_every_replica_knows_its_place(self, bench: Bench) -> None:
        """It has its rank, the same master address as the others, and its own log."""
        if not self.parallel:
            return
        text = """
            import os
            names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT POLLUX_NUM_NODES"
            print(*(os.environ[name] for name in names.split()))
        """
        bench.submit("ranked", text, gpus=3, **_named("ranked"))
        ended = bench.end("ranked")
        assert [(each.replica, each.code) for each in ended.exits] == [(0, 0), (1, 0), (2, 0)]
        rows = [bench.log("ranked", replica).split() for replica in range(3)]
        assert [row[:5] + row[6:] for row in rows] == [[str(n), str(n), "3", "3", "127.0.0.1", "1"] for n in range(3)]
        assert len({row[5] for row in rows}) == 1

    def test_when_one_replica_fails_the_rest_is_ended(self, bench: Bench) -> None:
        """Otherwise the other replicas could wait for ever; the detail names the replica that failed."""
        if not self.parallel:
            return
        text = """
            import os, time
            if os.environ["RANK"] == "1":
                raise RuntimeError("lost my way")
            time.sleep(600)
        """
        bench.submit("partial", text, gpus=2, **_named("partial"))
        ended = bench.end("partial")
        assert ended.outcome == "crashed"
        assert "replica 1" in ended.detail
        assert "lost my way" in ended.detail
        assert ended.exits[1].code == 1
        assert ended.exits[0].code != 0

    def test_one_replica_may_end_before_the_others(self, bench: Bench) -> None:
        """After an exit code 0 the generation goes on until the others have ended."""
        if not self.parallel:
            return
        text = """
            import os, time
            from pathlib import Path
            if os.environ["RANK"] == "0":
                raise SystemExit(0)
            Path("slow.up").write_text("yes\\n")
            while not Path("slow.go").exists():
                time.sleep(0.01)
        """
        bench.submit("slow", text, gpus=2, **_named("slow"))
        bench.file("slow.up")
        assert bench.ends("slow") == []
        (bench.folder / "slow.go").touch()
        assert bench.end("slow").outcome == "succeeded"

    def test_a_launch_waits_for_free_places(self, own_bench: Bench) -> None:
        """It starts when the job that holds the slots has ended."""
        if not self.parallel:
            return
        total = own_bench.backend.inventory()[0].num_gpus
        own_bench.submit("wide", _UNTIL_FILE, gpus=total, **_named("wide"))
        own_bench.submit("patient", "print('at last')", **_named("patient"))
        own_bench.file("wide.up")
        waiting = own_bench.running("patient")
        assert waiting is not None
        assert waiting.state == "waiting"
        (own_bench.folder / "wide.go").touch()
        assert own_bench.end("patient").outcome == "succeeded"
        order = [event.job_id for event in own_bench.told if isinstance(event, ReplicasEnded)]
        assert order == ["wide", "patient"]

    def test_what_waits_can_be_stopped(self, own_bench: Bench) -> None:
        """It ends without having started."""
        total = own_bench.backend.inventory()[0].num_gpus if self.parallel else 1
        own_bench.submit("holder", _UNTIL_FILE, gpus=total, **_named("holder"))
        own_bench.file("holder.up")
        launch = own_bench.submit("unborn", "open('unborn.ran', 'w')", **_named("unborn"))
        own_bench.backend.stop("unborn", 1, 1.0)
        own_bench.backend.submit(launch)
        (own_bench.folder / "holder.go").touch()
        own_bench.end("holder")
        assert own_bench.end("unborn").outcome == "stopped"
        own_bench.submit("last", "print()", **_named("last"))
        own_bench.end("last")
        assert not (own_bench.folder / "unborn.ran").exists()

    def test_a_resize_is_a_stop_and_the_next_generation(self, bench: Bench) -> None:
        """The next generation may be submitted at once, starts after the old replicas, and continues their log."""
        if not (self.parallel and self.separate):
            return
        first = _UNTIL_TOLD.replace("    signal.signal(", "    print('one', flush=True)\n    signal.signal(")
        bench.submit("resized", first, gpus=1, **_named("resized"))
        bench.file("resized.up")
        bench.backend.stop("resized", 1, 30.0)
        bench.submit("resized", "import os; print('two of', os.environ['WORLD_SIZE'])", 2, 2, **_named("resized"))
        assert bench.end("resized", 2).outcome == "succeeded"
        assert bench.end("resized", 1).outcome == "stopped"
        started = [e for e in bench.told if isinstance(e, ReplicasStarted) and e.job_id == "resized"]
        assert bench.told.index(bench.end("resized", 1)) < bench.told.index(started[1])
        assert bench.log("resized") == "one\ntwo of 2\n"
        assert bench.log("resized", 1) == "two of 2\n"

    def test_jobs_do_not_mix(self, bench: Bench) -> None:
        """Three jobs run at a time, each with its own end and log."""
        jobs = ["mixed-a", "mixed-b", "mixed-c"]
        for number, job in enumerate(jobs):
            bench.submit(job, f"print('{job}'); raise SystemExit({number})", **_named(job))
        assert [bench.end(job).exits[0].code for job in jobs] == [0, 1, 2]
        assert [bench.log(job) for job in jobs] == [f"{job}\n" for job in jobs]

    # Another object at the same home

    def test_a_new_object_finds_what_runs(self, own_bench: Bench) -> None:
        """Processes go on and are not started twice; the new object also reports what ended in between."""
        if not self.separate:
            return
        text = _UNTIL_FILE + "    print('finished')\n"
        launch = own_bench.submit("kept", text, **_named("kept"))
        own_bench.submit("meanwhile", text, **_named("meanwhile"))
        own_bench.file("kept.up")
        own_bench.file("meanwhile.up")
        own_bench.backend.close()
        (own_bench.folder / "meanwhile.go").touch()
        own_bench.told.clear()
        own_bench.backend = own_bench._begin()
        assert own_bench.end("meanwhile").outcome == "succeeded"
        own_bench.backend.submit(launch)
        kept = own_bench.running("kept")
        assert kept == Running("kept", 1, "running", None)
        (own_bench.folder / "kept.go").touch()
        assert own_bench.end("kept").outcome == "succeeded"
        assert own_bench.log("kept") == "finished\n"
        own_bench.restart()
        assert own_bench.end("kept").outcome == "succeeded"
        own_bench.backend.forget("kept")
        own_bench.wait("forgetting", lambda: own_bench.running("kept") is None)
        own_bench.restart()
        assert own_bench.running("kept") is None
        assert own_bench.log("kept") == "finished\n"

    def test_places_held_from_before_are_not_given_away(self, own_bench: Bench) -> None:
        """A new object knows which slots are taken."""
        if not (self.parallel and self.separate):
            return
        total = own_bench.backend.inventory()[0].num_gpus
        ((node, _),) = own_bench.submit("wide", _UNTIL_FILE, gpus=total, **_named("wide")).placement
        own_bench.file("wide.up")
        own_bench.restart()
        own_bench.wait("node", lambda: node in [each.id for each in own_bench.backend.inventory()])
        # New nodes may precede this one in the inventory.
        launch = own_bench.launch("patient", "open('patient.ran', 'w')", **_named("patient"))
        own_bench.backend.submit(replace(launch, placement=Placement.of({node: 1})))
        # Long enough for a job to start if it had a place.
        with pytest.raises(AssertionError, match="no start"):
            own_bench.wait("start", (own_bench.folder / "patient.ran").exists, 1.0)
        waiting = own_bench.running("patient")
        assert waiting is not None
        assert waiting.state == "waiting"
        (own_bench.folder / "wide.go").touch()
        own_bench.end("patient")
        assert [event.job_id for event in own_bench.told if isinstance(event, ReplicasEnded)] == ["wide", "patient"]


def _clear(bench: Bench) -> None:
    """Stop and forget all jobs."""
    for each in bench.backend.running():
        bench.backend.stop(each.job_id, each.generation, 0.0)
        bench.backend.forget(each.job_id)
    bench.wait("end of all", lambda: all(each.state == "ended" for each in bench.backend.running()))
    for each in bench.backend.running():
        bench.backend.forget(each.job_id)
    bench.wait("empty backend", lambda: not bench.backend.running())
    bench.backend.close()
