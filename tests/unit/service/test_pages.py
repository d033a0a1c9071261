from __future__ import annotations

import importlib.util
from pathlib import Path

from pollux.service.server.app import operations

DOCS = Path(__file__).resolve().parents[3] / "docs"


def test_the_page_of_the_api_is_current():
    spec = importlib.util.spec_from_file_location("make_api", DOCS / "make_api.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    page = (DOCS / "api-http.md").read_text()
    assert made.current(page) == page, "run: python docs/make_api.py"
    for operation in operations():
        assert f"`{operation.method} {operation.path}`" in page
