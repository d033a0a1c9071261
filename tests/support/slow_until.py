"""Runs a script whose own sleeps end at once when a file is there: its job lasts as long as a test needs it.

python slow_until.py FILE SCRIPT ARGUMENT...
"""

import os
import runpy
import sys
import time
from typing import SupportsIndex

FOLDER = os.path.dirname(os.path.abspath(__file__))


def command(file: os.PathLike[str], script: os.PathLike[str], *arguments: str) -> list[str]:
    """What runs the script so."""
    return [sys.executable, os.path.join(FOLDER, "slow_until.py"), str(file), str(script), *arguments]


def run() -> None:
    """Run the script of the command line."""
    file, wait = sys.argv[1], time.sleep

    def sleep(seconds: float | SupportsIndex) -> None:
        # Only those of the script itself: its libraries mean theirs.
        its_own = sys._getframe(1).f_globals.get("__name__") == "__main__"
        wait(0.0 if its_own and os.path.exists(file) else seconds)

    time.sleep = sleep
    sys.path[:] = [folder for folder in sys.path if folder != FOLDER]
    del sys.argv[:2]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    run()
