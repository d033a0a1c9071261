"""Slows a machine down for tests, in every Python that has this folder in PYTHONPATH: imports, and the disk.

`POLLUX_TEST_IMPORT_SECONDS`: so much longer `import torch` takes. `POLLUX_TEST_DISK_SECONDS`: so much longer each file
of a checkpoint takes to be written, and so much longer again whatever is to reach the disk.
"""

import os
import sys
import time

_IMPORT_SECONDS = float(os.environ.get("POLLUX_TEST_IMPORT_SECONDS", "0"))
_DISK_SECONDS = float(os.environ.get("POLLUX_TEST_DISK_SECONDS", "0"))


class _SlowTorch:
    """Finds nothing, and takes its time to find PyTorch."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "torch":
            time.sleep(_IMPORT_SECONDS)


if _IMPORT_SECONDS:
    sys.meta_path.insert(0, _SlowTorch)

if _DISK_SECONDS:
    _fsync = os.fsync

    def _slow_fsync(number):
        time.sleep(_DISK_SECONDS)
        _fsync(number)

    os.fsync = _slow_fsync

    def _slow_write(event, details):
        """Files that are opened to be written, whether anybody waits for the disk or not."""
        if event != "open" or not isinstance(details[0], str | bytes) or not details[2] & (os.O_WRONLY | os.O_RDWR):
            return
        if "checkpoints" in os.fsdecode(details[0]).split(os.sep)[:-1]:
            time.sleep(_DISK_SECONDS)

    sys.addaudithook(_slow_write)
