"""Backends through the suite that ships with the package; local jobs both ways of starting.

Those of clusters are in tests/integration, with the real engines.
"""

import pytest

from pollux.backends import create, names
from pollux.backends.local import LocalBackend
from pollux.testing.conformance.backends import BackendConformance


class TestLocalFromScratch(BackendConformance):
    @classmethod
    def backend(cls, home):
        return create("local", home=home, slots=3, warm=False)


class TestLocalWarm(BackendConformance):
    @classmethod
    def backend(cls, home):
        return create("local", home=home, slots=3, warm=True)

    @classmethod
    def is_ready(cls, backend):
        return backend.is_warm

    def test_scripts_find_everything_imported(self, bench):
        bench.submit("imported", "import sys; print('torch' in sys.modules)")
        bench.end("imported")
        assert bench.log("imported") == "True\n"


class TestInline(BackendConformance):
    parallel = False
    separate = False

    @classmethod
    def backend(cls, home):
        return create("inline", slots=3)


def test_every_backend_is_here():
    assert set(names()) == {"local", "inline", "ray", "slurm"}
    assert isinstance(create("local", home="unused", slots=1), LocalBackend)


@pytest.mark.parametrize("name", names())
def test_every_backend_says_what_it_is(name):
    from pollux.backends import available, summary

    assert summary(name)
    assert available(name) is None or name == "slurm", "Slurm is installed by make test-slurm only"
