"""A real Slurm cluster on this machine for all tests of a process: three nodes with four devices each."""

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


@pytest.fixture(scope="session")
def slurm():
    """The cluster; SLURM_CONF names it while it is there."""
    tool = _tool()
    wrong = tool.missing()
    if wrong:
        pytest.skip(wrong)
    # Not below pytest's own folder: munge's user must be able to enter it, and sockets have short names.
    folder = Path(tempfile.mkdtemp(prefix="pollux-slurm-"))
    cluster = tool.SlurmCluster(folder, nodes=3, gpus=4, grace_seconds=30, with_parent=True)
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
