"""What exists is documented: every policy, every command, every option."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
MADE_BY_TYPER = {"--help", "--install-completion", "--show-completion"}


def sections(page: str) -> dict[str, str]:
    """Heading to text, code blocks and sub-sections included, for every heading of a page."""
    open_sections: list[tuple[int, list[str]]] = []
    found: dict[str, list[str]] = {}
    in_code = False
    for line in (DOCS / page).read_text().splitlines():
        in_code ^= line.lstrip().startswith("```")
        heading = None if in_code else re.match(r"(#+)\s+(.*)", line)
        if heading:
            level, title = len(heading.group(1)), heading.group(2).replace("`", "").strip()
            open_sections = [(outer, lines) for outer, lines in open_sections if outer < level]
            open_sections.append((level, found.setdefault(title, [])))
        for _, lines in open_sections:
            lines.append(line)
    return {title: "\n".join(lines) for title, lines in found.items()}


def commands(command: Any, words: tuple[str, ...] = ("pollux",)) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every visible command below and including ``command``, with the words a user types for it."""
    yield words, command
    for name, child in getattr(command, "commands", {}).items():
        if not child.hidden:
            yield from commands(child, (*words, name))


def long_options(command: Any) -> list[str]:
    visible = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
    flags = [flag for parameter in visible for flag in parameter.opts if flag.startswith("--")]
    return [flag for flag in flags if flag not in MADE_BY_TYPER]


def mentions(text: str, word: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text) is not None


def test_every_policy_has_a_section():
    from pollux.policies import names

    headings = list(sections("policies.md"))
    undocumented = [name for name in names() if not any(mentions(heading, name) for heading in headings)]
    assert list(names()), "no policy is registered"
    assert undocumented == [], f"no heading of docs/policies.md names them; it has {headings}"


def test_every_command_and_option_is_documented():
    import typer.main

    from pollux.cli.main import app

    documented = sections("cli.md")
    whole_page = (DOCS / "cli.md").read_text()
    missing = []
    for words, command in commands(typer.main.get_command(app)):
        own = [text for heading, text in documented.items() if tuple(heading.split()[: len(words)]) == words]
        if not own and len(words) > 1:
            missing.append(" ".join(words))
        text = own[0] if own else whole_page
        missing += [f"{' '.join(words)} {flag}" for flag in long_options(command) if not mentions(text, flag)]
    assert missing == [], "docs/cli.md: a command needs a heading that begins with it, options a mention below"


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: str(page.relative_to(DOCS)))
def test_page_has_a_title(page):
    assert page.read_text().startswith("# ")
