"""The backend on top: what is shown before anything is asked, and how nodes that are about to go are told."""

from pathlib import Path

import pytest

from pollux import backends
from pollux.backends.nodes.provider import LentNode
from pollux.backends.slurm.backend import SlurmBackend
from pollux.backends.slurm.job_provider import SlurmJobProvider
from pollux.backends.slurm.job_requests import host_port
from pollux.backends.slurm.script import SlurmOptions, array_words
from pollux.core import Node
from pollux.core.errors import InvalidInput


def hosted(name):
    return LentNode(Node(name, 4), ("127.0.0.1", 4000))


@pytest.fixture
def backend(tmp_path):
    return SlurmBackend(tmp_path, gpus_per_node=4, pool=tmp_path / "pool", head="127.0.0.1")


def test_a_preview_writes_nothing(tmp_path):
    text = SlurmBackend.preview(
        tmp_path / "home", gpus_per_node=4, nodes="2..8", pool=tmp_path / "pool", head="10.0.0.1"
    )
    assert text.startswith("sbatch --parsable --array=0-1 <<'END'\n#!/bin/bash\n")
    assert text.endswith("END\n")
    assert list(tmp_path.iterdir()) == []


def test_a_preview_without_pilots_is_what_a_decision_would_send(tmp_path):
    text = SlurmBackend.preview(tmp_path, gpus_per_node=4, mode="job", head="10.0.0.1", pool=tmp_path / "pool")
    sent: list[tuple[str, int]] = []

    class PlayedSlurm:
        def submit(self, script, count):
            sent.append((script, count))
            return "1"

    lender = SlurmJobProvider(tmp_path / "pool", SlurmOptions(gpus_per_node=4, mode="job"), PlayedSlurm())
    lender.books.head = "10.0.0.1"
    lender._requests.submit_lacking({"JOB": {"NODE"}}, ())
    assert [text] == [f"{' '.join(array_words(count))} <<'END'\n{script}END\n" for script, count in sent]
    assert f"--ports NODE:{host_port(str(tmp_path / 'pool'), 'NODE')}" in text


@pytest.mark.parametrize("mode", ["pilot", "job"])
def test_a_preview_shows_a_cpu_for_each_slot(tmp_path, mode):
    given = {"slots": 4, "mode": mode, "head": "10.0.0.1", "pool": tmp_path / "pool"}
    assert "#SBATCH --cpus-per-task=4\n" in SlurmBackend.preview(tmp_path, **given)
    assert "#SBATCH --cpus-per-task=2\n" in SlurmBackend.preview(tmp_path, cpus_per_node=2, **given)


def test_what_the_shell_has_for_sbatch_is_the_default(tmp_path, monkeypatch):
    shell = {"SBATCH_ACCOUNT": "lab", "SBATCH_PARTITION": "gpu", "SBATCH_QOS": "long", "SBATCH_TIMELIMIT": "2:00:00"}
    for name, value in {**shell, "SLURM_JOB_PARTITION": "login", "SBATCH_EXCLUSIVE": "1"}.items():
        monkeypatch.setenv(name, value)
    given = {"gpus_per_node": 4, "head": "10.0.0.1", "pool": tmp_path / "pool"}
    text = SlurmBackend.preview(tmp_path, **given)
    for line in ("--account=lab", "--partition=gpu", "--qos=long", "--time=2:00:00"):
        assert f"#SBATCH {line}\n" in text
    assert "#SBATCH --partition=cpu\n" in SlurmBackend.preview(tmp_path, partition="cpu", **given)
    options = SlurmBackend(tmp_path, account="own", **given)._slurm.options
    assert (options.account, options.partition) == ("own", "gpu")
    monkeypatch.setenv("SBATCH_TIMELIMIT", "soon")
    with pytest.raises(InvalidInput, match="time_limit is 'soon'"):
        SlurmBackend.preview(tmp_path, **given)


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        ("slurm 20.02.7", "Slurm 20.02.7 is here, and 20.11 or newer is needed"),
        ("slurm-wlm 19.05", "Slurm 19.05 is here"),
        ("slurm 20.11.0", None),
        ("slurm-wlm 22.05.8", None),
        ("slurm 25.05.1-1", None),
        ("who knows", None),
    ],
)
def test_too_old_a_slurm_is_told_before_anything_is_asked(tmp_path, monkeypatch, said, wrong):
    for name in ("sbatch", "squeue", "sinfo", "scancel"):
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{said}'\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = backends.available("slurm")
    assert found is None if wrong is None else found.startswith(wrong)
    if wrong is not None:
        with pytest.raises(InvalidInput, match="backend 'slurm' cannot be used here: Slurm"):
            backends.create("slurm", home=tmp_path, slots=1)


def test_the_page_shows_what_would_be_sent(monkeypatch):
    monkeypatch.setenv("HOME", "/shared/ada")
    given = {"nodes": "3", "gpus_per_node": 4, "partition": "gpu", "time_limit": "4:00:00", "head": "10.0.0.5"}
    home = Path("/shared/ada/.local/state/pollux")
    text = SlurmBackend.preview(home, python="/shared/ada/venv/bin/python", **given)
    page = (Path(__file__).parents[4] / "docs" / "slurm.md").read_text()
    assert f"--option head=10.0.0.5 --dry-run\n{text}```" in page
    (name,) = [line for line in text.splitlines() if "--job-name=" in line]
    assert f" {name.partition('=')[2]} RUNNING node1 " in page


def test_only_hosts_that_are_up_are_asked_for_folders_when_a_job_is_submitted(tmp_path, monkeypatch):
    """Without pilots nodes are offered that nobody listens on yet: each would be waited for."""
    backend = SlurmBackend(tmp_path, gpus_per_node=4, pool=tmp_path / "pool", head="127.0.0.1", mode="job")
    backend._slurm.books.offer([hosted("node1"), hosted("node2")])
    backend._slurm.books.up = {"node2": hosted("node2")}
    monkeypatch.setattr(backend._shared, "refuses", lambda folders, hosts: str([each.node.id for each in hosts]))
    assert backend.refuses(["/shared"]) == "['node2']"


def test_all_nodes_of_pilots_are_asked_for_folders(backend, monkeypatch):
    backend._slurm.offer([hosted("node1"), hosted("node2")])
    monkeypatch.setattr(backend._shared, "refuses", lambda folders, hosts: f"{len([*hosts])} asked")
    assert backend.refuses(["/shared"]) == "2 asked"


def test_wrong_options_are_refused_before_anything_is_asked(tmp_path):
    with pytest.raises(InvalidInput, match="gpus_per_node=N"):
        SlurmBackend(tmp_path)


def test_another_home_meets_its_nodes_in_another_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    one, two = (SlurmBackend.preview(tmp_path / name, slots=1, head="10.0.0.1") for name in ("one", "two"))
    assert str(tmp_path / ".pollux-slurm") in one
    assert one != two


def test_it_says_what_is_missing(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert "no sbatch, squeue, sinfo, scancel in PATH" in backends.available("slurm")
