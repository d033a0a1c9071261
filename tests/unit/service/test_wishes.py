"""How many nodes would be used: enough for everybody's most, one to find out their size, none without jobs."""

from types import SimpleNamespace

import pytest

from pollux.core import Cluster, JobLimits
from pollux.service.wishes import nodes_wanted


def job(most):
    return SimpleNamespace(spec=SimpleNamespace(limits=JobLimits(max_gpus=most)))


@pytest.mark.parametrize(
    ("most", "nodes", "wanted"),
    [((), 0, 0), ((), 3, 0), ((8,), 0, 1), ((1,), 1, 1), ((4, 4), 1, 2), ((4, 5), 1, 3), ((64,), 2, 16)],
)
def test_nodes_for_everybody(most, nodes, wanted):
    cluster = Cluster.uniform(nodes, 4) if nodes else Cluster(())
    assert nodes_wanted([job(each) for each in most], cluster) == wanted
