"""Every formula names its equation: the numbers cited in the code are those of docs/goodput.md."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NUMBER = re.compile(r"\(G(\d+)\)")


def code_lines(page: str) -> Iterator[str]:
    """The lines inside the fenced blocks of a page."""
    in_code = False
    for line in page.splitlines():
        if line.startswith("```"):
            in_code = not in_code
        elif in_code:
            yield line


def numbered() -> list[int]:
    """The equations of the page, in order: an equation is a line of a code block that ends in its number."""
    page = (ROOT / "docs" / "goodput.md").read_text()
    matches = (re.search(r"\(G(\d+)\)$", line) for line in code_lines(page))
    return [int(match.group(1)) for match in matches if match]


def cited() -> dict[int, list[str]]:
    """By equation, where the code cites it."""
    found: dict[int, list[str]] = {}
    for path in sorted((ROOT / "src").rglob("*.py")):
        for count, line in enumerate(path.read_text().splitlines(), start=1):
            for number in NUMBER.findall(line):
                found.setdefault(int(number), []).append(f"{path.relative_to(ROOT)}:{count}")
    return found


def test_numbers_are_consecutive():
    found = numbered()
    assert found == list(range(1, len(found) + 1))
    assert found, "docs/goodput.md has no numbered equation"


def test_every_cited_equation_is_on_the_page():
    unknown = {number: places for number, places in cited().items() if number not in numbered()}
    assert unknown == {}


def test_every_equation_is_cited():
    uncited = [number for number in numbered() if number not in cited()]
    assert uncited == [], "no docstring or comment under src cites them"


def test_pages_refer_to_equations_that_exist():
    known = set(numbered())
    for page in sorted((ROOT / "docs").rglob("*.md")):
        mentioned = set(map(int, NUMBER.findall(page.read_text())))
        assert mentioned <= known, f"{page.relative_to(ROOT)} refers to {sorted(mentioned - known)}"


def test_pages_name_the_constants_of_the_code():
    from pollux.policies.elastic.pollux import Pollux
    from pollux.sim.simulation import jobs

    goodput, policies = ((ROOT / "docs" / f"{page}.md").read_text() for page in ("goodput", "policies"))
    assert f"ρ is at least {Pollux.start_floor:g} " in goodput
    assert f"ρ is at least {Pollux.start_floor:g} " in policies
    assert f"at least {jobs._BATCH_GAIN:.1%} more goodput".replace("%", " %") in goodput
