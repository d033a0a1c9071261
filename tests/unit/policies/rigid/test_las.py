import math

import pytest

from pollux.core import InvalidInput
from pollux.policies.rigid.las import Las
from pollux.testing import cluster, job, snapshot


def served(*views, held=None, policy=None):
    return set((policy or Las()).allocate(snapshot(cluster(4), views, held)).allocation)


def attained(job_id: str, gpu_seconds: float, submitted_at: float = 0.0):
    return job(job_id, submitted_at, requested_gpus=4, attained_gpu_seconds=gpu_seconds)


def test_least_attained_service_first():
    assert served(attained("much", 7200.0), attained("little", 0.0, 50.0)) == {"little"}


def test_service_is_compared_in_steps():
    """Within one quantum the running job goes on; at its end the other takes over."""
    assert served(attained("runs", 3599.0, 50.0), attained("waits", 0.0), held={"runs": "n0:4"}) == {"runs"}
    assert served(attained("runs", 3600.0, 50.0), attained("waits", 0.0), held={"runs": "n0:4"}) == {"waits"}


def test_then_submission_then_order():
    assert served(attained("late", 0.0, 9.0), attained("early", 0.0, 1.0)) == {"early"}
    assert served(attained("b", 0.0), attained("a", 0.0)) == {"b"}


def test_the_quantum_can_be_chosen():
    views = attained("runs", 100.0, 50.0), attained("waits", 0.0)
    assert served(*views, held={"runs": "n0:4"}, policy=Las(quantum_gpu_seconds=100.0)) == {"waits"}


@pytest.mark.parametrize("quantum", [0.0, -1.0, math.nan])
def test_a_quantum_of_nothing_is_refused(quantum):
    with pytest.raises(InvalidInput, match="quantum_gpu_seconds"):
        Las(quantum_gpu_seconds=quantum)
