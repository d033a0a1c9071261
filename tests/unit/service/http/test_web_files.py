from __future__ import annotations

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from pollux.service import create_app
from pollux.service.http.middleware import SECURITY_HEADERS
from pollux.service.http.web_files import FOLDER, WebFiles, add_pages, is_page
from pollux.service.server.app import operations

BASE = "http://127.0.0.1:7341"


@pytest.fixture
def site(tmp_path):
    (tmp_path / "static" / "js").mkdir(parents=True)
    (tmp_path / "static" / "js" / "app.js").write_text("1;")
    for name in ("index", "job", "policies", "signin"):
        (tmp_path / f"{name}.html").write_text(f"<!doctype html><title>{name}</title>")
    app = Starlette()
    add_pages(app, WebFiles(tmp_path))
    return TestClient(app)


@pytest.mark.parametrize(
    ("path", "title"), [("/", "index"), ("/jobs/some-job", "job"), ("/policies", "policies"), ("/signin", "signin")]
)
def test_every_page_has_its_file(site, path, title):
    answer = site.get(path)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    assert title in answer.text
    assert site.head(path).status_code == 200
    assert is_page(path)


def test_what_the_browser_has_is_not_sent_again(site):
    first = site.get("/static/js/app.js")
    assert first.headers["content-type"].startswith("text/javascript")
    mark = first.headers["etag"]
    for header in (mark, f"W/{mark}", f'"other", {mark}'):
        again = site.get("/static/js/app.js", headers={"if-none-match": header})
        assert (again.status_code, again.content) == (304, b"")
    assert site.get("/static/js/app.js", headers={"if-none-match": '"other"'}).status_code == 200
    assert "no-cache" in first.headers["cache-control"]


@pytest.mark.parametrize(
    "path",
    [
        "/static/../index.html",
        "/static/%2e%2e/%2e%2e/server.py",
        "/static/js",
        "/static//etc/passwd",
        "/static/none.js",
    ],
)
def test_nothing_but_the_files_is_served(site, path):
    assert site.get(path).status_code == 404


def test_paths_of_data_are_no_pages():
    for operation in operations():
        if operation.path.startswith("/v1/"):
            assert not is_page(operation.path), operation.path
    for path in ("/v1/jobs", "/jobs/a/b", "/metrics", "/jobs/", "/policiesx", "/staticx", "/v1/static/x"):
        assert not is_page(path)


def test_every_answer_has_the_headers_that_keep_others_out(world):
    with TestClient(create_app(world.engine, world.tokens), base_url=BASE) as client:
        operator = {"authorization": f"Bearer {world.tokens.operator}"}
        asked = [
            ("/", {}),
            ("/docs", {}),
            ("/healthz", {}),
            ("/v1/jobs", {}),
            ("/v1/jobs", operator),
            ("/no", operator),
        ]
        for path, headers in asked:
            answer = client.get(path, headers=headers)
            for name, value in SECURITY_HEADERS.items():
                assert answer.headers[name] == value, path
        policy = SECURITY_HEADERS["content-security-policy"]
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert client.get("/v1/jobs", headers=operator).headers["cache-control"] == "no-store"
        assert client.get("/", headers={"host": "evil.example"}).status_code == 403
        docs = client.get("/docs").text
        assert "<style" not in docs
        assert "/docs.css" in docs
        assert client.get("/docs.css").headers["content-type"].startswith("text/css")


def test_pages_hold_nothing_inline():
    for path in FOLDER.glob("*.html"):
        text = path.read_text()
        assert "<style" not in text, path
        assert " style=" not in text, path
        assert "<script>" not in text, path
        assert "http://" not in text.replace("http://www.w3.org", ""), path
