"""The generated parts of docs/cli.md are those that `docs/make_cli.py` writes."""

import subprocess
import sys
from pathlib import Path


def test_the_page_of_the_command_line_is_current():
    script = Path(__file__).resolve().parents[3] / "docs" / "make_cli.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
