"""Every policy finds the GPUs that a job wants, whatever nodes call them."""

import pytest

from pollux import policies
from pollux.core import Cluster, Node, check
from pollux.testing import snapshot
from pollux.testing.conformance.policy_cases import known_job

CLUSTER = Cluster.of([Node("t", 4, "Tesla T4"), Node("a", 4, "NVIDIA A100-SXM4-40GB"), Node("r", 4, "A100")])


@pytest.mark.parametrize("name", policies.names())
def test_a_type_is_found_by_its_words(name):
    policy = policies.create(name)
    jobs = [known_job("picky", gpu_types=("a100",), requested_gpus=2, min_gpus=2, max_gpus=2)]
    seen = snapshot(CLUSTER, jobs)
    decision = policy.allocate(seen)
    placement = decision.allocation["picky"]
    assert placement.num_gpus == 2
    assert {node for node, _ in placement} <= {"a", "r"}
    assert [*check(seen, decision)] == []
