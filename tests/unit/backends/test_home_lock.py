"""One object at a time works in a home; when it is closed, the next may, whoever has its open files for a moment."""

import os

import pytest

from pollux.backends.local import LocalBackend
from pollux.core.errors import Conflict


def test_a_home_is_free_once_its_backend_is_closed_though_a_fork_has_its_files_still(tmp_path):
    first = LocalBackend(tmp_path, slots=1, warm=False)
    first.start(lambda event: None)
    forked = os.dup(first._dispatcher._home_lock)
    second = LocalBackend(tmp_path, slots=1, warm=False)
    try:
        with pytest.raises(Conflict, match="another service works in"):
            LocalBackend(tmp_path, slots=1, warm=False).start(lambda event: None)
        first.close()
        second.start(lambda event: None)
    finally:
        os.close(forked)
        first.close()
        second.close()
