"""Every number on the pages is explained, with the same sentence on the page and in the documentation."""

from __future__ import annotations

import re
from pathlib import Path

from pollux.service.http import web_files

JS = web_files.FOLDER / "static" / "js"
DOCS = Path(__file__).resolve().parents[2] / "docs" / "web-page.md"
WORDS = dict(re.findall(r'^  "([^"]+)": "([^"]+)",$', (JS / "words.js").read_text(), re.MULTILINE))


def test_the_documentation_has_every_sentence():
    rows = dict(re.findall(r"^\| (.+?) \| (.+?) \|$", DOCS.read_text(), re.MULTILINE))
    rows = {name: text for name, text in rows.items() if name not in ("number", "---")}
    assert rows == WORDS


def test_each_is_one_sentence():
    for name, text in WORDS.items():
        assert re.fullmatch(r"[A-Z][^.]*(?:\.\d[^.]*)*\.", text), name


# What job and receipt say in words, not in numbers.
NO_NUMBERS = {"Mode", "Trained as plain PyTorch would", "Learning-rate rule", "Last save"}


def test_every_number_shown_has_one():
    text = {path.stem: path.read_text() for path in JS.glob("*.js")}
    shown: set[str] = set()
    for name in ("cluster", "job", "receipt"):
        found = set(re.findall(r'\b(?:tile|fact|info)\("([^"]+)"', text[name]))
        assert found, name
        shown |= found
    # Charts are explained by their title, or by another word where they show more than that.
    for name in ("series", "policies"):
        titles = re.findall(r'title: "([^"]+)"(?:, about: "([^"]*)")?', text[name])
        assert titles, name
        shown |= {word for title, about in titles for word in (title, about) if word}
    # Columns of tables and the lines beside headings.
    columns = re.findall(r'\["([A-Z0-9][^"]+)", (?:\(row\) =>|null\])', text["policies"])
    assert len(set(columns)) > 6
    shown |= set(columns)
    for script in text.values():
        shown |= set(re.findall(r'\babout: "([^"]+)"', script))
        shown |= set(re.findall(r'\bannotate\("[^"]+", "([^"]+)"', script))
    assert len(shown) > 40
    assert shown - NO_NUMBERS <= set(WORDS)


# Columns of names, words and times of the clock.
IN_WORDS = {
    "In words", "In words, and why", "Job", "Policy", "What", "What happened, and why", "When", "Why", "Why it waits",
}  # fmt: skip


def test_every_column_has_its_word_or_holds_words():
    seen = 0
    for path in sorted(JS.glob("*.js")):
        for column in re.findall(r'\{ (?:key: "\w+", )?name: "[^"]+"[^{}]*\}', path.read_text()):
            name = re.search(r'name: "([^"]+)"', column)[1]
            seen += 1
            assert (name in IN_WORDS) != ("about: " in column), f"{path.name}: {column}"
    assert seen > 30


def test_every_line_beside_a_heading_that_has_numbers_is_explained():
    """Lines that scripts fill in, but for those that say all in words."""
    in_words = {"log-hint", "metrics-left-out", "outdated"}
    text = "".join(path.read_text() for path in JS.glob("*.js"))
    explained = set(re.findall(r'\bannotate\("([^"]+)"', text))
    found: set[str] = set()
    for path in sorted(web_files.FOLDER.glob("*.html")):
        found |= set(re.findall(r'<p class="hint" id="([^"]+)"[^>]*></p>', path.read_text()))
    assert len(found) > 6
    assert found - in_words <= explained
    assert in_words <= found


def test_nothing_of_the_page_makes_markup_of_text():
    scripts = sorted(JS.glob("*.js"))
    assert len(scripts) > 15
    for path in scripts:
        text = path.read_text()
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
            assert word not in text, f"{path.name} has {word}"


def test_pages_have_no_script_or_style_of_their_own():
    for path in sorted(web_files.FOLDER.glob("*.html")):
        text = path.read_text()
        assert re.findall(r"<script(?![^>]* src=)", text) == [], path.name
        assert "style=" not in text, path.name
        assert re.findall(r'\son[a-z]+="', text) == [], path.name
        assert re.findall(r'(?:src|href)="(?!/)', text) == [], path.name
