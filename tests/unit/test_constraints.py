"""constraints.txt holds on every Python that the project supports, from its first patch release on."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

from packaging.specifiers import SpecifierSet

REPOSITORY = Path(__file__).resolve().parents[2]
PINNED = re.findall(r"^([A-Za-z0-9._-]+)==", (REPOSITORY / "constraints.txt").read_text(), re.MULTILINE)
CLASSIFIERS = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["classifiers"]
PYTHONS = [found[1] + ".0" for each in CLASSIFIERS if (found := re.search(r"Python :: (3\.\d+)$", each))]


def required_python(name: str) -> str | None:
    """What the installed distribution asks of Python; None where this Python does not need it."""
    try:
        return importlib.metadata.metadata(name).get("Requires-Python") or ""
    except importlib.metadata.PackageNotFoundError:
        return None


def test_a_pinned_version_installs_on_each_python():
    """Distributions ship old patch releases: Debian 12 has Python 3.11.2."""
    known = {name: needs for name in PINNED if (needs := required_python(name)) is not None}
    assert len(known) > 100
    refused = {name: needs for name, needs in known.items() if any(each not in SpecifierSet(needs) for each in PYTHONS)}
    assert refused == {}
