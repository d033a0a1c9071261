"""The knobs that make a machine slow for tests do: what they slow takes at least so much longer."""

import os
import subprocess
import sys
from pathlib import Path

SLOWNESS = Path(__file__).parents[2] / "integration" / "slurm" / "slowness"
SECONDS = 0.5
WRITES = """
import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1]) / "checkpoints"
folder.mkdir()

def plain():
    (folder / "part").write_bytes(b"x")

def to_the_disk():
    with (folder.parent / "note").open("w") as file:
        os.fsync(file.fileno())

def read():
    (folder / "part").read_bytes()

for act in (plain, to_the_disk, read):
    began = time.monotonic()
    act()
    print(act.__name__, time.monotonic() - began)
"""


def test_a_slow_disk_slows_plain_writes_of_checkpoints_and_all_that_wait_for_it(tmp_path):
    environ = os.environ | {"PYTHONPATH": str(SLOWNESS), "POLLUX_TEST_DISK_SECONDS": str(SECONDS)}
    words = [sys.executable, "-c", WRITES, str(tmp_path)]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=True)
    took = {line.split()[0]: float(line.split()[1]) for line in done.stdout.splitlines()}
    assert took["plain"] >= SECONDS
    assert took["to_the_disk"] >= SECONDS
    assert took.keys() == {"plain", "to_the_disk", "read"}
