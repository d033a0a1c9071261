"""The TensorBoard example of docs/tracking.md, run as two generations of one job: one curve, each sample once."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[3] / "docs" / "tracking.md"


def blocks() -> list[str]:
    text = PAGE.read_text()
    section = text[text.index("## TensorBoard") : text.index("## Weights & Biases")]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


def read(folder: Path) -> dict[str, list[int]]:
    reader = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(folder), purge_orphaned_data=True)
    events.Reload()
    return {tag: [event.step for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tracking")
    example, by_hand = blocks()
    (folder / "train.py").write_text(
        f"{example}\n{by_hand}\nif writer:\n    writer.add_scalar('end', 1.0, job.samples)\n    writer.close()\n"
    )
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("POLLUX_", "RANK", "WORLD"))}
    for generation, epochs in ((1, 2), (2, 4)):
        variables = {
            "POLLUX_RUN_ID": "example-0123", "POLLUX_CHECKPOINT_DIR": str(folder / "checkpoints"),
            "POLLUX_GENERATION": str(generation), "EPOCHS": str(epochs), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "train.py"], cwd=folder, env=environ | variables, timeout=300, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    return folder


def test_both_generations_are_one_run(folder):
    assert [path.name for path in (folder / "runs").iterdir()] == ["example-0123"]
    assert len(list((folder / "runs" / "example-0123").iterdir())) == 2, "a file of each process"
    seen = read(folder / "runs" / "example-0123")
    assert seen["metrics/error"] == [256, 512, 768, 1024]
    for tag, samples in seen.items():
        assert samples == sorted(set(samples)), tag


def test_a_writer_of_ones_own(folder):
    assert read(folder / "own" / "example-0123")["end"] == [512, 1024]
