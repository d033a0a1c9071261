"""Every registered policy through the suite that the package ships."""

import pytest

from pollux.core import Policy
from pollux.policies import create, names
from pollux.testing.conformance.policies import PolicyConformance


class TestPollux(PolicyConformance):
    def policy(self) -> Policy:
        return create("pollux")


class TestPolluxGeneticQuick(PolicyConformance):
    """A search this small finds legal answers, not good ones."""

    work_conserving = False
    stable = False

    def policy(self) -> Policy:
        return create("pollux-genetic", population=10, generations=5)


class TestCastor(PolicyConformance):
    def policy(self) -> Policy:
        return create("castor")


class TestTiresias(PolicyConformance):
    def policy(self) -> Policy:
        return create("tiresias")


class TestOptimusOracle(PolicyConformance):
    def policy(self) -> Policy:
        return create("optimus-oracle")


class TestFifo(PolicyConformance):
    work_conserving = False

    def policy(self) -> Policy:
        return create("fifo")


class TestFifoBackfilling(PolicyConformance):
    def policy(self) -> Policy:
        return create("fifo", strict=False)


class TestSrtf(PolicyConformance):
    def policy(self) -> Policy:
        return create("srtf")


class TestLas(PolicyConformance):
    def policy(self) -> Policy:
        return create("las")


SUITES = [suite for suite in globals().values() if isinstance(suite, type) and suite.__name__.startswith("Test")]


@pytest.mark.parametrize("name", names())
def test_every_policy_has_its_suite(name):
    assert name in [suite().policy().name for suite in SUITES]
