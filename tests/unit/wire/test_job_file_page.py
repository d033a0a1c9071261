"""docs/job-file.md is true: its examples read, every key is there, and its messages are those of the code."""

import dataclasses
import re
from pathlib import Path
from typing import get_args

import pytest

from pollux.core.errors import InvalidInput
from pollux.wire.job import PRIORITY_WEIGHTS, BatchSizes, JobRequest, Priority
from pollux.wire.jobfile import JOB_KEYS, read_job_file

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "job-file.md").read_text()
MINIMAL, EVERY_KEY = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
MESSAGES = re.findall(r"^```text\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)[0].splitlines()
INNER_KEYS = [
    *(f"batch_size.{field.name}" for field in dataclasses.fields(BatchSizes)),
    *(f"resources.{key}" for key in ("cpus", "memory", "gpu_type", "mixed_types")),
    *(f"checkpoint.{key}" for key in ("dir", "every", "keep")),
]
MISTAKES = [
    "gpus: 0..4",
    "gpus: 1:16",
    "prioritty: high",
    "memory: 16GiB",
    "resources: {memory: 16G}",
    "env: {RANK: 0}",
    "run: python train.py",
]


def job(folder: Path, text: str) -> JobRequest:
    path = folder / "job.yaml"
    path.write_text(text)
    return read_job_file(path)


def test_every_key_has_a_row_and_every_row_a_key():
    assert re.findall(r"^\| `([\w.]+)` \|", PAGE, re.MULTILINE) == sorted(
        [*JOB_KEYS, *INNER_KEYS],
        key=lambda key: (JOB_KEYS.index(key.partition(".")[0]), [*JOB_KEYS, *INNER_KEYS].index(key)),
    )


def test_the_examples_read(tmp_path):
    assert job(tmp_path, MINIMAL) == JobRequest("train", ("python", "train.py"), workdir=str(tmp_path))
    read = job(tmp_path, EVERY_KEY)
    assert read.name == "resnet18-cifar10"
    assert [line.partition(":")[0] for line in EVERY_KEY.splitlines()] == list(JOB_KEYS)


def test_the_defaults_are_those_of_the_code(tmp_path):
    plain = job(tmp_path, MINIMAL)
    default = dict(re.findall(r"^\| `(\w+)` \|[^|]*\| `?(\w+)`? \|", PAGE, re.MULTILINE))
    assert default["gpus"] == str(plain.max_gpus)
    assert default["priority"] == plain.priority
    assert default["queue"] == plain.queue
    assert default["retries"] == str(plain.retries)
    assert default["grace"] == f"{plain.grace_seconds:g}s"
    low, normal, high = (PRIORITY_WEIGHTS[priority] for priority in get_args(Priority))
    assert f"counts {low:g}, {normal:g} or {high:g}" in PAGE


@pytest.mark.parametrize(("mistake", "message"), list(zip(MISTAKES, MESSAGES, strict=True)))
def test_the_messages_are_those_of_the_code(tmp_path, mistake, message):
    with pytest.raises(InvalidInput) as caught:
        job(tmp_path, f"run: python train.py\n{mistake}\n")
    assert str(caught.value).replace(f"{tmp_path}/", "") == message
