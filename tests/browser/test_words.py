"""Every number on the pages is explained, with the same sentence on the page and in the documentation."""

from __future__ import annotations

import re
from pathlib import Path

from pollux.service import webpages

JS = webpages.FOLDER / "static" / "js"
DOCS = Path(__file__).resolve().parents[2] / "docs" / "web-page.md"
WORDS = dict(re.findall(r'^  "([^"]+)": "([^"]+)",$', (JS / "words.js").read_text(), re.MULTILINE))


def test_the_documentation_has_every_sentence():
    rows = dict(re.findall(r"^\| (.+?) \| (.+?) \|$", DOCS.read_text(), re.MULTILINE))
    rows = {name: text for name, text in rows.items() if name not in ("number", "---")}
    assert rows == WORDS


def test_each_is_one_sentence():
    for name, text in WORDS.items():
        assert re.fullmatch(r"[A-Z][^.]*(?:\.\d[^.]*)*\.", text), name


# What the receipt says in words, not in numbers.
NO_NUMBERS = {"Mode", "Trained as plain PyTorch would", "Learning-rate rule"}


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
    # Columns of tables: those of numbers stand to the right, or have their explanation.
    columns = re.findall(r'\["([A-Z0-9][^"]+)", (?:\(row\) =>|null\])', text["policies"])
    assert len(set(columns)) > 6
    shown |= set(columns)
    for name, script in text.items():
        if '"./words.js"' not in script:
            continue
        looked_up = {first or second for first, second in re.findall(r'WORDS(?:\["([^"]+)"\]|\.(\w+))', script)}
        assert looked_up <= set(WORDS), name
        for column in re.findall(r'\{ name: "[^"]+"[^{}]*class: "right"[^{}]*\}', script):
            assert "about: " in column, f"{name}.js: {column}"
    assert len(shown) > 40
    assert shown - NO_NUMBERS <= set(WORDS)


def test_nothing_of_the_page_makes_markup_of_text():
    scripts = sorted(JS.glob("*.js"))
    assert len(scripts) > 15
    for path in scripts:
        text = path.read_text()
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
            assert word not in text, f"{path.name} has {word}"


def test_pages_have_no_script_or_style_of_their_own():
    for path in sorted(webpages.FOLDER.glob("*.html")):
        text = path.read_text()
        assert re.findall(r"<script(?![^>]* src=)", text) == [], path.name
        assert "style=" not in text, path.name
        assert re.findall(r'\son[a-z]+="', text) == [], path.name
        assert re.findall(r'(?:src|href)="(?!/)', text) == [], path.name
