"""What the README tells people to type is there, and what it shows is what comes out."""

import json
import re
from pathlib import Path

import pytest
from typer.main import get_command

from pollux.cli.main import app

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
MAKEFILE = (Path(__file__).parents[2] / "Makefile").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)
    return [text for named, text in found if named == language]


def test_it_fits_two_screens():
    assert len(README.splitlines()) <= 80


def test_make_targets_exist():
    for target in re.findall(r"make ([a-z]+)", README):
        assert re.search(rf"^{target}:", MAKEFILE, flags=re.MULTILINE), target


def test_linked_files_exist():
    root = Path(__file__).parents[2]
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", README) + re.findall(r'src="([^"]+)"', README):
        assert link.startswith("http") or (root / link).exists(), link


@pytest.mark.parametrize(
    "line", [line[2:] for block in blocks("") for line in block.splitlines() if line.startswith("$ pollux ")]
)
def test_commands_and_options_exist(line):
    command, words = get_command(app), line.partition("#")[0].split()[1:]
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known


def test_the_transcript_shows_only_what_was_typed():
    """That the same commands print such lines is tested against a real service, with the command line."""
    block = next(block for block in blocks("") if block.startswith("$ pollux up"))
    assert len(block.splitlines()) <= 16
    submitted = [Path(word) for line in block.splitlines() for word in line.split() if word.endswith("job.yaml")]
    files = [(Path(__file__).parents[2] / file).read_text(encoding="utf-8") for file in submitted]
    names = [match[1] for file in files if (match := re.search(r"^name: (\S+)", file, flags=re.MULTILINE))]
    shown = re.findall(r"^(\S+) +(?:queued|starting|running|resizing) ", block, flags=re.MULTILINE)
    assert shown
    assert set(shown) <= set(names)


def train(folder: str) -> None:
    """Run in a replica: the first example on a small task, in fewer epochs."""
    import torch
    from torch import nn

    def build():
        torch.manual_seed(0)
        x = torch.randn(512, 10)
        model = nn.Linear(10, 3)
        dataset = torch.utils.data.TensorDataset(x, x[:, :3].argmax(1))
        return model, torch.optim.SGD(model.parameters(), lr=0.5), dataset

    example = blocks("python")[0].replace("epochs(90)", "epochs(3)")
    space = {"__name__": "readme", "build": build, "nn": nn}
    exec(compile(example, "README.md", "exec"), space)
    space["job"].write_receipt(folder)  # type: ignore[attr-defined]


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_the_training_example_trains(replica_server, tmp_path, num_replicas):
    replica_server.run(f"{Path(__file__).resolve()}:train", num_replicas, {"folder": str(tmp_path)})
    receipt = json.loads((tmp_path / "receipt.json").read_text())
    assert (receipt["mode"], receipt["totals"]["steps"]) == ("exact", 12)
    assert [entry["samples"] for entry in receipt["ledger"]] == [512, 512, 512]


def test_five_lines_are_marked():
    assert re.findall(r"# (\d)\b", blocks("python")[0]) == ["1", "2", "3", "4", "5"]


@pytest.mark.parametrize("policy", ["castor", "pollux"])
def test_the_simulation_gives_the_average_in_the_table(policy):
    from pollux.policies import create
    from pollux.sim import builtin_applications, builtin_workload, simulate

    jobs = simulate(builtin_workload(), create(policy), builtin_applications()).jobs
    hours = sum(job.finished - job.submitted for job in jobs) / len(jobs) / 3600
    shown = re.search(rf"\| `{policy}` \| \**([0-9.]+) h", README)
    assert shown is not None
    assert f"{hours:.2f}" == shown.group(1)
