import math

import pytest

from pollux.core import InvalidInput, JobLimits, JobView, Queue, is_gpu_type
from pollux.testing import SaturatingGoodput, job, snapshot


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"min_gpus": 0}, "min_gpus is 0"),
        ({"min_gpus": 4, "max_gpus": 3}, "max_gpus is 3, below min_gpus 4"),
        ({"max_nodes": 0}, "max_nodes is 0"),
        ({"cpus_per_gpu": -1.0}, "cpus_per_gpu is -1"),
        ({"cpus_per_gpu": math.inf}, "cpus_per_gpu is inf"),
        ({"memory_bytes_per_gpu": math.nan}, "memory_bytes_per_gpu is nan"),
    ],
)
def test_impossible_limits_are_refused(fields, said):
    with pytest.raises(InvalidInput, match=said):
        JobLimits(**fields)


@pytest.mark.parametrize(
    ("wanted", "gpu_type", "matches"),
    [
        ("a100", "NVIDIA A100-SXM4-40GB", True),
        ("a100", "A100", True),
        ("A100", "a100_80gb", True),
        ("a100-40gb", "NVIDIA A100-SXM4-40GB", True),
        ("a100-80gb", "NVIDIA A100-SXM4-40GB", False),
        ("a10", "NVIDIA A100-SXM4-40GB", False),
        ("a100", "", False),
        ("", "A100", False),
        ("", "", True),
        ("-", "A100", False),
        ("NVIDIA A100-SXM4-40GB", "A100", False),
    ],
)
def test_types_are_compared_by_their_words(wanted, gpu_type, matches):
    assert is_gpu_type(wanted, gpu_type) is matches
    assert JobLimits(gpu_types=("v100", wanted)).takes_type(gpu_type) is matches


def test_limits_that_leave_no_choice_are_allowed():
    assert JobLimits(min_gpus=4, max_gpus=4, max_nodes=1).max_gpus == 4


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"weight": 0.0}, "weight is 0"),
        ({"weight": math.nan}, "weight is nan"),
        ({"requested_gpus": 0}, "requested_gpus is 0"),
    ],
)
def test_impossible_jobs_are_refused(fields, said):
    with pytest.raises(InvalidInput, match=f"job 'j': {said}"):
        JobView("j", 0.0, **fields)


def test_models_are_no_part_of_equality():
    assert job("j", goodput=SaturatingGoodput()) == job("j")
    assert job("j", requested_gpus=2) != job("j")


def test_weight_is_the_jobs_times_its_queues():
    views = [job("a", weight=3.0, queue="q"), job("b", weight=3.0)]
    seen = snapshot(jobs=views, queues=[Queue("q", weight=0.5)])
    assert [seen.weight(view) for view in views] == [1.5, 3.0]
