"""Real Slurm clusters on this machine: one for all tests of a process, and one of another shape."""

import contextlib
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[3] / "tools" / "slurm" / "cluster.py"


def _tool():
    specification = importlib.util.spec_from_file_location("pollux_slurm_cluster", TOOL)
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return module


@contextlib.contextmanager
def running(**shape):
    """A cluster of that shape; SLURM_CONF names it while it is there."""
    tool = _tool()
    wrong = tool.missing()
    if wrong:
        pytest.skip(wrong)
    # Not below pytest's own folder: munge's user must be able to enter it, and sockets have short names.
    folder = Path(tempfile.mkdtemp(prefix="pollux-slurm-"))
    cluster = tool.SlurmCluster(folder, grace_seconds=30, with_parent=True, **shape)
    before = {name: os.environ.get(name) for name in cluster.environ}
    os.environ.update(cluster.environ)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def slurm():
    """Three nodes with four devices each, for all tests of a process."""
    with running(nodes=3, gpus=4) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def slurm_of_two_types():
    """Two nodes with two devices of one type each, and one with two of another."""
    with running(nodes=3, gpus=2, types=("a100", "a100", "v100")) as cluster:
        yield cluster
