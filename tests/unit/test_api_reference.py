"""docs/api: every public module has its place, and the site that is built from it has every public name."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pollux.testing.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs" / "api").glob("*.md"))


# Of the backends' parts only what a new backend is built from; the rest is the inside of our own processes.
INTERNAL = re.compile(r"pollux\.backends\.\w+\.(?!backend$|provider$|options$)[\w.]+")
ALIASES = {
    "pollux.agent.huggingface",
    "pollux.agent.ledger",
    "pollux.agent.lightning",
    "pollux.testing.backend_conformance",
}


def public_modules(room: str) -> list[str]:
    files = (ROOT / "src" / "pollux" / room).rglob("*.py")
    names = [".".join(path.relative_to(ROOT / "src").with_suffix("").parts) for path in files if path.stem[0] != "_"]
    return sorted(name for name in names if not INTERNAL.fullmatch(name) and name not in ALIASES)


def referenced(page: Path) -> list[str]:
    return re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)


def test_the_agent_has_a_page():
    assert "agent" in [page.stem for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_public_module_is_on_its_page_once(page):
    assert sorted(referenced(page)) == public_modules(page.stem)


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert [page.stem for page in PAGES if f"api/{page.name}" not in navigation] == []


def test_names_of_the_package_are_those_of_documented_modules():
    import pollux.agent

    modules = [importlib.import_module(name) for name in referenced(ROOT / "docs" / "api" / "agent.md")]
    documented = {name for module in modules for name in module.__all__}
    assert sorted(set(pollux.agent.__all__) - documented) == []


def built(folder: Path) -> Path:
    """The site with the pages of the reference alone; a warning ends the build."""
    pages = folder / "docs"
    pages.mkdir()
    for page in PAGES:
        # Links to other pages are checked by `make docs`, with all pages there.
        (pages / page.name).write_text(re.sub(r"\[([^]]+)\]\(\.\./[^)]+\)", r"\1", page.read_text()))
    (folder / "src").symlink_to(ROOT / "src")
    settings = (ROOT / "mkdocs.yml").read_text()
    (folder / "mkdocs.yml").write_text(settings[: settings.index("\nnav:\n")])
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-f", str(folder / "mkdocs.yml")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder / "site"


def not_shown(page: Path, html: str) -> list[str]:
    return [
        f"{name}.{exported}"
        for name in referenced(page)
        for exported in importlib.import_module(name).__all__
        if getattr(getattr(importlib.import_module(name), exported), "__module__", name) == name
        if f'id="{name}.{exported}"' not in html
    ]


@pytest.mark.slow
def test_every_public_name_is_in_the_site(tmp_path):
    # One test for all pages: the site is built once, however many processes share the tests.
    site = built(tmp_path)
    missing = {page.stem: not_shown(page, (site / page.stem / "index.html").read_text()) for page in PAGES}
    assert missing == {page.stem: [] for page in PAGES}
