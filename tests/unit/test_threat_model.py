"""The threat model names a test for every attack, and each of them is there."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "threat-model.md").read_text()


def test_every_test_that_the_page_names_is_there():
    named = re.findall(r"`(tests/[\w/.]+)`", PAGE)
    assert len(named) > 15
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_attack_has_a_test():
    rows = [line for line in PAGE.partition("## Tests")[2].splitlines() if line.startswith("| ")][1:]
    assert [row for row in rows if "`tests/" not in row] == []
