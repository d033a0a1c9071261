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


def test_every_number_shown_has_one():
    shown = set()
    for name in ("cluster", "job"):
        shown |= set(re.findall(r'\b(?:tile|fact|info)\("([^"]+)"', (JS / f"{name}.js").read_text()))
    series = (JS / "series.js").read_text()
    titles = re.findall(r'title: "([^"]+)"(?:, about: "([^"]*)")?', series)
    shown |= {about or title for title, about in titles}
    assert len(shown) > 20
    assert shown <= set(WORDS)


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
