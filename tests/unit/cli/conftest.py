"""A small measured world: one application, two nodes with two GPUs, four jobs of a few minutes."""

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pollux.cli.main import app


def load_fake() -> Any:
    """The module beside this one; tests are no package, so it is loaded by its path."""
    name = "pollux_fake_service"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("fake_service.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


PLACEMENTS = {"1": 0.0, "2": 0.02, "11": 0.05, "12": 0.06, "22": 0.07}
SMALL_CLUSTER = ("--nodes", "2", "--gpus-per-node", "2")


def write_profiles(folder: Path) -> Path:
    tiny = folder / "tiny"
    tiny.mkdir(parents=True)
    rows = [
        f"{placement},{local},{0.1 + 0.01 * local + sync:.3f},{sync}"
        for placement, sync in PLACEMENTS.items()
        for local in (4, 8, 16)
    ]
    (tiny / "placements.csv").write_text("placement,local_bsz,step_time,sync_time\n" + "\n".join(rows) + "\n")
    for batch in (8, 16, 32):
        epochs = [f"{epoch * 600},{epoch * 4800 // batch},1.0,{4.0 * epoch}" for epoch in (1, 2, 3)]
        header = "progress,iteration,grad_sqr,grad_var\n"
        (tiny / f"validation-{batch}.csv").write_text(header + "\n".join(epochs) + "\n")
    return folder


WORKLOAD = """name,time,application,num_replicas,batch_size
first,0,tiny,2,16
second,30,tiny,2,32
third,90,tiny,1,8
fourth,100,tiny,4,32
"""


@pytest.fixture
def profiles(tmp_path: Path) -> Path:
    return write_profiles(tmp_path / "profiles")


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    path = tmp_path / "small.csv"
    path.write_text(WORKLOAD)
    return path


@pytest.fixture
def run() -> Callable[..., object]:
    """Run `pollux` with these words in this process."""
    return lambda *words: CliRunner().invoke(app, [str(word) for word in words], prog_name="pollux")


@pytest.fixture
def simulate(run, profiles, workload):
    """Run `pollux simulate` on the small world, with further words."""
    return lambda *words: run("simulate", workload, "--profiles", profiles, *SMALL_CLUSTER, "--workers", 1, *words)


@pytest.fixture
def fake(monkeypatch, tmp_path) -> Iterator[Any]:
    """A fake service that the command line finds through its home folder."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.delenv("POLLUX_SERVER", raising=False)
    monkeypatch.delenv("POLLUX_TOKEN", raising=False)
    monkeypatch.setenv("POLLUX_HOME", str(home))
    module = load_fake()
    with module.serving({}) as service:
        (home / "service.json").write_text(json.dumps({"url": service.url, "pid": 1}))
        (home / "token").write_text(module.TOKEN + "\n")
        (home / "token").chmod(0o600)
        service.home = home
        service.job = module.job
        service.error = module.error
        service.plan = module.PLAN
        service.status = module.STATUS
        yield service
