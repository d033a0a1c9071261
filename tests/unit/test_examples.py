"""examples/: each is short, differs from plain PyTorch by what its diff shows, and learns what it says it learns."""

import io
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from pollux.testing.waiting import PATIENCE_SECONDS

HERE = Path(__file__).resolve()
EXAMPLES = HERE.parents[2] / "examples"
NAMES = ("digits", "regression", "stream", "text")
MOST_LINES = 150
MOST_ADDED = 12


def script(path: str, options: list[str]) -> None:
    """Run in a replica: the script as `python path options` would run it."""
    sys.argv = [path, *options]
    runpy.run_path(path, run_name="__main__")


def output(replica_server, name, *options, num_replicas=1, **environment):
    """What each replica of a script prints."""
    arguments = {"path": str(EXAMPLES / name), "options": list(options)}
    results = replica_server.start(f"{HERE}:script", num_replicas, arguments, environment).wait(PATIENCE_SECONDS)
    assert [result.exit_code for result in results] == [0] * num_replicas, "\n".join(r.output for r in results)
    return [result.output for result in results]


def last_number(printed: str, before: str) -> float:
    """The number after the last `before`."""
    return float(re.findall(rf"{before}([0-9.]+)", printed)[-1])


def applied(text: str, diff: str) -> str:
    """What a unified diff makes of a text; fails where it does not fit."""
    old, new, place = text.splitlines(), [], 0
    for line in diff.splitlines()[2:]:
        if hunk := re.match(r"@@ -(\d+)", line):
            start = int(hunk.group(1)) - 1
            new += old[place:start]
            place = start
            continue
        if line[:1] != "+":
            assert old[place] == line[1:]
            place += 1
        if line[:1] != "-":
            new.append(line[1:])
    return "\n".join([*new, *old[place:]]) + "\n"


def test_every_example_is_known():
    assert sorted(folder.name for folder in EXAMPLES.iterdir() if (folder / "plain.py").exists()) == list(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_diff_leads_from_plain_to_adapted(name):
    plain, train, diff = ((EXAMPLES / name / file).read_text() for file in ("plain.py", "train.py", "changes.diff"))
    remedy = "write it again: diff -u --label plain.py --label train.py plain.py train.py > changes.diff"
    assert diff.startswith("--- plain.py\n+++ train.py\n")
    assert applied(plain, diff) == train, remedy


@pytest.mark.parametrize("name", NAMES)
def test_five_lines_are_marked_and_few_others_added(name):
    diff = (EXAMPLES / name / "changes.diff").read_text()
    added = [line[1:] for line in diff.splitlines()[2:] if line.startswith("+") and line[1:].strip()]
    assert [line[-1] for line in added if re.search(r"  # \d$", line)] == ["1", "2", "3", "4", "5"]
    assert len(added) <= MOST_ADDED


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("file", ["plain.py", "train.py"])
def test_scripts_are_short(name, file):
    assert len((EXAMPLES / name / file).read_text().splitlines()) < MOST_LINES


@pytest.fixture
def some_text(tmp_path):
    """A third of the documentation: enough to learn from, and no more work with every page that is written."""
    for name in ("cli.md", "goodput.md", "policies.md", "training.md"):
        (tmp_path / name).write_bytes((EXAMPLES.parent / "docs" / name).read_bytes())
    return str(tmp_path)


def test_the_text_is_the_documentation():
    example = runpy.run_path(str(EXAMPLES / "text" / "plain.py"))
    pages = [path.read_text() for path in example["DOCS"].rglob("*.md")]
    lines, test, _ = example["load"](example["DOCS"])
    assert len(lines) + len(test) == sum(len(line) > 1 for page in pages for line in page.splitlines())


@pytest.mark.parametrize(
    ("name", "options"), [("digits", ("--epochs", "1")), ("regression", ("--epochs", "1", "--samples", "3200"))]
)
def test_plain_scripts_run(replica_server, name, options):
    (printed,) = output(replica_server, f"{name}/plain.py", *options)
    assert printed.startswith("epoch 1: ")


def test_plain_text_runs(replica_server, some_text):
    (printed,) = output(replica_server, "text/plain.py", "--epochs", "1", "--text", some_text)
    assert printed.startswith("epoch 1: ")


def test_digits_adaptive(replica_server, tmp_path):
    options = ("--epochs", "2", "--max-batch-size", "512")
    (printed,) = output(replica_server, "digits/train.py", *options, POLLUX_OUTPUT_DIR=str(tmp_path))
    assert last_number(printed, "accuracy ") > 0.7
    receipt = json.loads((tmp_path / "receipt.json").read_text())
    assert (receipt["mode"], receipt["max_batch"]) == ("adaptive", 512)
    assert receipt["totals"]["samples"] >= 2 * 27_000 * 0.999
    assert {row["samples"] for row in receipt["ledger"]} == {27_000}


def test_digits_under_torchrun():
    meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *meeting]
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(
        [*command, EXAMPLES / "digits" / "train.py", "--epochs", "1"],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        printed, errors = process.communicate(timeout=PATIENCE_SECONDS)
    finally:
        # torchrun ends its replicas on SIGTERM, and would leave them behind on SIGKILL.
        process.terminate()
        process.wait(PATIENCE_SECONDS)
    assert process.returncode == 0, errors
    assert printed.count("epoch 1: ") == 1
    assert last_number(printed, "accuracy ") > 0.55
    assert "replicas: 2" in printed


@pytest.mark.parametrize("num_replicas", [1, pytest.param(2, marks=pytest.mark.long)])
def test_the_interval_of_the_noise_scale_holds_the_truth(replica_server, num_replicas):
    printed = output(replica_server, "regression/train.py", "--epochs", "1", num_replicas=num_replicas)
    found = re.search(r"noise scale (\S+) \(95 %: (\S+) to (\S+)\) after .*; in truth (\S+)", printed[0])
    assert found is not None, printed[0]
    _, low, high, truth = map(float, found.groups())
    # Which steps are measured depends on the clock, and one 95 % interval in twenty misses: twice as wide, none does.
    margin = (high / low) ** 0.5
    assert low / margin < truth < high * margin
    assert high / low < 3.0
    assert printed[1:] == [""] * (num_replicas - 1)


def test_the_stream_follows_the_curve_of_plain_pytorch(replica_server):
    options = ("--epochs", "2", "--length", "9000")
    (plain,) = output(replica_server, "stream/plain.py", *options)
    (train,) = output(replica_server, "stream/train.py", *options)
    assert train == plain
    assert last_number(train, "last 100 ") < 0.05


def test_text_on_two_replicas(replica_server, some_text):
    first, second = output(replica_server, "text/train.py", "--epochs", "2", "--text", some_text, num_replicas=2)
    assert last_number(first, "epoch 2: ") < 4.0
    assert second == ""


def test_the_job_file_of_digits_is_one():
    from pollux.wire.jobfile import check_paths, read_job_file

    request = read_job_file(EXAMPLES / "digits" / "job.yaml")
    assert (request.name, request.min_gpus, request.max_gpus) == ("digits", 1, 4)
    assert check_paths(request) == ()


@pytest.fixture
def demo(monkeypatch):
    """The modules of the demonstration, as `python examples/demo/run.py` would import them."""
    monkeypatch.syspath_prepend(str(EXAMPLES / "demo"))
    import cluster
    import run

    yield cluster, run
    for name in ("cluster", "run"):
        sys.modules.pop(name, None)


def test_the_demonstration_sums_up_what_it_saw(demo, tmp_path, monkeypatch):
    cluster, run = demo
    ours = {
        "long": cluster.Watched(
            0.0, 30.0, "succeeded", [(1.0, 1, 32, 1.0), (5.0, 2, 32, 1.0), (9.0, 2, 64, 0.8)], 0.97
        ),
        "short": cluster.Watched(4.0, 14.0, "succeeded", [(4.5, 0, 0, 1.0), (5.0, 1, 32, 1.0)], 0.95),
    }
    theirs = {
        "long": cluster.Watched(0.0, 40.0, "succeeded", [(1.0, 2, 32, 1.0)], 0.97),
        "short": cluster.Watched(4.0, 44.0, "succeeded", [(41.0, 2, 32, 1.0)], 0.95),
    }
    monkeypatch.setattr(run, "WORKLOAD", (None, None))
    figures = run.summary(ours, theirs)
    assert figures["mean_completion_seconds"] == {"pollux": 20.0, "fifo": 40.0}
    assert figures["ratio"] == 0.5
    assert figures["jobs"]["long"]["pollux"]["slots"] == "1→2"
    assert figures["jobs"]["long"]["pollux"]["batches"] == "32→64"
    assert figures["jobs"]["short"]["fifo"]["completion_seconds"] == 40.0
    run.draw(ours, theirs, tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_the_demonstration_notes_the_end_by_the_services_clock(demo):
    cluster, _ = demo
    job = cluster.Watched(submitted=3.0)
    status = {
        "state": "running",
        "gpus": 1,
        "batch_size": 32,
        "efficiency": None,
        "submitted_at": 100.0,
        "ended_at": None,
    }
    cluster.note(job, status, 5.0)
    assert (job.ended, job.samples) == (None, [(5.0, 1, 32, 1.0)])
    cluster.note(job, {**status, "state": "succeeded", "gpus": 0, "ended_at": 110.0}, 14.0)
    assert job.completion_seconds == pytest.approx(10.0)


@pytest.fixture
def faked(demo, monkeypatch):
    """The demonstration with a service that is none: what it is told, and jobs that have succeeded at once."""
    cluster, run = demo
    calls, jobs = [], {}

    def pollux(service, *words):
        calls.append(words)
        if words[0] == "up":
            port = words[words.index("--port") + 1]
            service.folder.mkdir(parents=True, exist_ok=True)
            port = "4711" if port == "0" else port
            (service.folder / "service.json").write_text(json.dumps({"url": f"http://127.0.0.1:{port}"}))
            (service.folder / "token").write_text("secret\n")
        return ""

    def post(service, path, body):
        jobs[body["name"]] = {
            "id": body["name"], "state": "succeeded", "gpus": 0, "batch_size": 32, "efficiency": 1.0, "progress": 1.0,
            "submitted_at": 1.0, "ended_at": 3.0 if service.policy == "pollux" else 5.0,
        }  # fmt: skip

    def get(service, path):
        return {"rows": []} if "series" in path else {"jobs": list(jobs.values())}

    for name, function in (("pollux", pollux), ("post", post), ("get", get)):
        monkeypatch.setattr(cluster.Service, name, function)
    monkeypatch.setattr(run, "WORKLOAD", tuple(cluster.Request(f"j{i}", 0.0, 1, 1) for i in range(2)))
    return run, calls, jobs


def test_the_demonstration_has_one_page_from_begin_to_end(faked, tmp_path):
    """The second half goes on at the address and with the token of the first, and its jobs are told apart."""
    run, calls, jobs = faked
    compared = []
    console = run.Console(file=io.StringIO(), width=100)
    runs = run.both(console, tmp_path / "home", lambda *both: compared.append(both))
    assert [(words[0], words[-1]) for words in calls] == [
        ("up", "0"),
        ("down", "down"),
        ("up", "4711"),
        ("down", "down"),
    ]
    assert [words[words.index("--policy") + 1] for words in calls if words[0] == "up"] == ["pollux", "fifo"]
    assert list(jobs) == ["j0", "j1", "fixed-j0", "fixed-j1"]
    assert runs[2] == "", "it did not end early"
    assert [list(one) for one in runs[:2]] == [["j0", "j1"]] * 2
    assert [one["j0"].completion_seconds for one in runs[:2]] == [2.0, 4.0]
    assert compared == [runs[:2]]
    said = console.file.getvalue()
    assert said.index("http://127.0.0.1:4711") < said.index("with pollux")
    assert "secret" in said


@pytest.mark.parametrize("stay", [False, True])
def test_the_demonstration_ends_by_itself_in_a_terminal_too(faked, tmp_path, monkeypatch, stay):
    run, calls, _ = faked
    asked = []
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(run.Console, "input", lambda console, prompt: asked.append((prompt, calls[-1][0])))
    console = run.Console(file=io.StringIO(), width=100, force_terminal=True)
    run.both(console, tmp_path / "service", lambda *both: None, stay)
    # Where it waits the service is still up.
    assert asked == [("done; the page is at http://127.0.0.1:4711 until you press Enter ", "up")] * stay
    assert ("--stay" in console.file.getvalue()) is not stay
    assert calls[-1] == ("down",)


def test_the_demonstration_says_who_took_too_long_and_stops_its_service(faked, tmp_path):
    run, calls, _ = faked
    console = run.Console(file=io.StringIO(), width=200)
    *_, early = run.both(console, tmp_path / "service", lambda *both: None, limit_seconds=-1.0)
    assert early.startswith("both halves did not end within")
    assert "j0 not submitted, j1 not submitted" in early
    assert early in console.file.getvalue()
    assert calls[-1] == ("down",)


@pytest.mark.parametrize("half", ["pollux", "fifo"])
def test_an_interrupt_leaves_picture_and_figures_of_what_finished(faked, tmp_path, monkeypatch, half):
    run, calls, _ = faked
    watch = run.watch

    def interrupted(console, service, *rest):
        if service.policy == half:
            raise KeyboardInterrupt
        watch(console, service, *rest)

    monkeypatch.setattr(run, "watch", interrupted)
    monkeypatch.setattr(sys, "argv", ["run.py", "--output", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        run.main()
    assert ended.value.code == 130
    figures = json.loads((tmp_path / "summary.json").read_text())
    assert {name: list(job) for name, job in figures["jobs"].items()} == (
        {} if half == "pollux" else {"j0": ["pollux"], "j1": ["pollux"]}
    )
    assert "ratio" not in figures
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert calls[-1] == ("down",)


def test_the_demonstration_removes_only_what_it_made(faked, tmp_path, monkeypatch):
    run, _, jobs = faked
    output = tmp_path / "mine"
    output.mkdir()
    (output / "thesis.tex").write_text("years of work")
    monkeypatch.setattr(sys, "argv", ["run.py", "--output", str(output)])
    monkeypatch.setattr(run, "draw", lambda pollux, fixed, path: None)
    for _ in range(2):
        jobs.clear()
        with pytest.raises(SystemExit) as ended:
            run.main()
        assert ended.value.code == 0
        assert (output / "thesis.tex").read_text() == "years of work"
        assert json.loads((output / "summary.json").read_text())["seconds"] >= 0
        assert not (output / "service" / "left").exists()
        # A service takes a folder that is not empty only where nobody else can read it.
        assert (output / "service").stat().st_mode & 0o077 == 0
        (output / "service" / "left").write_text("by the run before")
    (output / "service" / run.MARK).unlink()
    with pytest.raises(SystemExit, match="is not the demonstration's; give another --output"):
        run.main()
    assert (output / "service" / "left").exists()
