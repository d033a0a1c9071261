"""The Slurm cluster for tests: it takes no folder in which another one runs."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).resolve().parents[3] / "tools" / "slurm" / "cluster.py"


def load():
    specification = importlib.util.spec_from_file_location("pollux_slurm_cluster_tool", TOOL)
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return module


def test_a_folder_in_which_a_cluster_runs_is_not_taken(tmp_path):
    tool = load()
    assert tool._in_use(tmp_path) == ""
    environ = {**os.environ, "SLURM_CONF": f"{tmp_path}/slurm.conf"}
    # It says when it is there: before that its environment is its parent's.
    words = [sys.executable, "-c", "print('here', flush=True); input()"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ) as daemon:
        assert daemon.stdout.readline() == b"here\n"
        (tmp_path / "pids.json").write_text(json.dumps({"gone": 2**22 + 1, "munged": daemon.pid}))
        assert "a cluster runs" not in tool._in_use(tmp_path / "other")
        found = tool._in_use(tmp_path)
        daemon.communicate(b"\n")
    assert found == f"a cluster runs in {tmp_path} already: stop it, or give another folder with --dir"
    assert tool._in_use(tmp_path) == "", "what an earlier cluster left behind is no cluster"
