from __future__ import annotations

import json
import stat

import pytest
from starlette.testclient import TestClient

from pollux.core.errors import InvalidInput, StoreFailed, Unauthorised
from pollux.service import ServiceSettings, Tokens, create_app
from pollux.service.auth.sessions import COOKIE, SESSION_SECONDS, Sessions, WrongTokens, cookie_of
from pollux.service.server.serve import build_engine, prepare_home
from pollux.store import MemoryStore
from pollux.testing.servers.service import ManualClock

BASE = "http://127.0.0.1:7341"


@pytest.fixture
def tokens():
    return Tokens("operator-token-for-tests", "secret", "viewer-token-for-tests")


@pytest.fixture
def clock():
    return ManualClock(1000.0)


def test_a_session_lasts_a_week_and_is_kept_as_a_hash(tokens, clock):
    store = MemoryStore()
    sessions = Sessions(store, tokens, clock.now)
    session_id, session = sessions.open(tokens.operator)
    assert session.role == "operator"
    assert sessions.find(session_id) == session
    kept = store.setting("sessions")
    assert session_id not in kept
    assert tokens.operator not in kept
    assert Sessions(store, tokens, clock.now).find(session_id) == session, "a restart signs nobody out"
    clock.set(clock.time + SESSION_SECONDS)
    assert sessions.find(session_id) is None


def test_roles_follow_the_token(tokens, clock):
    sessions = Sessions(MemoryStore(), tokens, clock.now)
    assert sessions.open(tokens.viewer)[1].role == "viewer"
    for wrong in ("", "x", tokens.for_job("a"), tokens.operator + "x", "\udcff"):
        with pytest.raises(Unauthorised):
            sessions.open(wrong)


def test_a_new_token_ends_the_sessions_of_the_old_one(tokens, clock):
    store = MemoryStore()
    operator, _ = Sessions(store, tokens, clock.now).open(tokens.operator)
    viewer, _ = Sessions(store, tokens, clock.now).open(tokens.viewer)
    changed = Sessions(store, Tokens("another-operator-token", "secret", tokens.viewer), clock.now)
    assert changed.find(operator) is None
    assert changed.find(viewer) is not None


def test_signing_out_holds_over_a_restart(tokens, clock):
    store = MemoryStore()
    sessions = Sessions(store, tokens, clock.now)
    session_id, _ = sessions.open(tokens.operator)
    other, _ = sessions.open(tokens.operator)
    sessions.close(session_id)
    sessions.close("nobody")
    assert sessions.find(session_id) is None
    again = Sessions(store, tokens, clock.now)
    assert again.find(session_id) is None
    assert again.find(other) is not None


def test_the_oldest_of_many_sessions_go(tokens, clock):
    store = MemoryStore()
    sessions = Sessions(store, tokens, clock.now)
    ids = []
    for _ in range(200):
        clock.set(clock.time + 1.0)
        ids.append(sessions.open(tokens.viewer)[0])
    assert [sessions.find(each) is not None for each in ids] == [False] * 72 + [True] * 128
    assert len(json.loads(store.setting("sessions"))) == 128


@pytest.mark.parametrize("many", ["viewer", "operator"])
def test_many_of_one_role_sign_nobody_of_the_other_out(tokens, clock, many):
    sessions = Sessions(MemoryStore(), tokens, clock.now)
    first = {role: sessions.open(getattr(tokens, role))[0] for role in ("operator", "viewer")}
    for _ in range(200):
        clock.set(clock.time + 1.0)
        sessions.open(getattr(tokens, many))
    assert {role for role in first if sessions.find(first[role])} == set(first) - {many}


def test_a_damaged_list_and_a_full_disk_keep_nobody_out(tokens, clock):
    class Full(MemoryStore):
        def set_setting(self, name, value):
            raise StoreFailed("the disk is full")

    store = MemoryStore()
    store.set_setting("sessions", "[1, 2")
    assert Sessions(store, tokens, clock.now).find("x") is None
    sessions = Sessions(Full(), tokens, clock.now)
    assert sessions.find(sessions.open(tokens.operator)[0]) is not None


@pytest.mark.parametrize(
    ("header", "found"),
    [
        (None, None),
        ("", None),
        (f"{COOKIE}=abc", "abc"),
        (f"a=b; {COOKIE}=abc; c=d", "abc"),
        (f"not_{COOKIE}=abc", None),
        (f"{COOKIE}=" + "x" * 10_000, None),
        (f'a={{"x":1}}; {COOKIE}=abc', "abc"),
        (f"a=b c; {COOKIE}=abc", "abc"),
        (f"flag; {COOKIE}=abc", "abc"),
        (f"path=1; {COOKIE}=abc", "abc"),
        (f"\xe9=1;;=; {COOKIE}=abc", "abc"),
        (f'a="; {COOKIE}=abc', "abc"),
        (f"{'a' * 20_000}=1; {COOKIE}=abc", "abc"),
        (f"{COOKIE}=; {COOKIE}=abc", "abc"),
    ],
)
def test_the_cookie_is_found_beside_any_others(header, found):
    assert cookie_of(header, COOKIE) == found


def test_two_services_on_one_host_do_not_sign_each_other_out(clock):
    services = [Sessions(MemoryStore(), Tokens("operator-token", secret), clock.now) for secret in ("one", "two")]
    ids = [service.open("operator-token")[0] for service in services]
    header = "; ".join(f"{service.cookie}={session_id}" for service, session_id in zip(services, ids, strict=True))
    assert [service.id_in(header) for service in services] == ids
    again = Sessions(MemoryStore(), Tokens("operator-token", "one"), clock.now)
    assert again.cookie == services[0].cookie, "a restart signs nobody out"


def test_a_browser_with_odd_cookies_signs_in(world):
    with TestClient(create_app(world.engine, world.tokens), base_url=BASE) as browser:
        answer = browser.post("/v1/session", json={"token": world.tokens.viewer})
        mine = answer.headers["set-cookie"].partition(";")[0]
        browser.cookies.clear()
        header = {"cookie": f'other={{"x": 1}}; flag; a=b c; {mine}'}
        assert browser.get("/v1/session", headers=header).json()["role"] == "viewer"


def test_wrong_tokens_wait_once_there_are_many(clock):
    wrong = WrongTokens(clock.now, most=8)
    assert [wrong.start_attempt() for _ in range(9)] == [0.0] * 5 + [1.0] * 3 + [None]
    for _ in range(8):
        wrong.end_attempt()
    clock.set(clock.time + 3.0)
    assert [wrong.start_attempt(), wrong.start_attempt()] == [0.0, 1.0]


@pytest.fixture
def browser(world):
    with TestClient(create_app(world.engine, world.tokens), base_url=BASE) as client:
        yield client


def sign_in(browser, token):
    answer = browser.post("/v1/session", json={"token": token})
    assert answer.status_code == 200, answer.text
    return answer


def test_signing_in_sets_a_cookie_that_scripts_cannot_read(world, browser):
    answer = sign_in(browser, world.tokens.operator)
    cookie = answer.headers["set-cookie"].lower()
    for word in ("httponly", "samesite=strict", "path=/", "max-age="):
        assert word in cookie
    assert "secure" not in cookie
    assert answer.json() == browser.get("/v1/session").json()
    assert answer.json()["role"] == "operator"
    assert browser.get("/v1/jobs").status_code == 200


def test_over_tls_the_cookie_is_secure(world):
    with TestClient(create_app(world.engine, world.tokens), base_url="https://127.0.0.1:7341") as client:
        assert "secure" in sign_in(client, world.tokens.operator).headers["set-cookie"].lower()


def test_changes_need_the_word_that_only_our_page_knows(world, browser):
    csrf = sign_in(browser, world.tokens.operator).json()["csrf"]
    world.submit("a", max_gpus=1)
    for headers in ({}, {"x-pollux-csrf": ""}, {"x-pollux-csrf": csrf[:-1] + "!"}, {"x-pollux-csrf": "é".encode()}):
        refused = browser.post("/v1/jobs/a/pause", headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "Forbidden")
    assert world.engine.job("a").state != "paused"
    assert browser.post("/v1/jobs/a/pause", headers={"x-pollux-csrf": csrf}).json()["job"]["state"] == "paused"
    assert browser.delete("/v1/session").status_code == 403
    assert browser.delete("/v1/session", headers={"x-pollux-csrf": csrf}).status_code == 200
    assert browser.get("/v1/jobs").status_code == 401


def test_pages_of_others_get_nothing(world, browser):
    csrf = sign_in(browser, world.tokens.operator).json()["csrf"]
    for site in ("cross-site", "same-site"):
        refused = browser.get("/v1/jobs", headers={"sec-fetch-site": site})
        assert refused.status_code == 403
        assert (
            browser.post("/v1/jobs/a/pause", headers={"sec-fetch-site": site, "x-pollux-csrf": csrf}).status_code == 403
        )
    assert browser.get("/v1/jobs", headers={"sec-fetch-site": "same-origin"}).status_code == 200


@pytest.mark.parametrize("by", ["cookie", "token"])
def test_who_only_looks_changes_nothing_and_sees_no_secrets(world, browser, by):
    world.submit("a", max_gpus=1, env={"KEY": "hunter2"})
    headers = {}
    if by == "cookie":
        headers["x-pollux-csrf"] = sign_in(browser, world.tokens.viewer).json()["csrf"]
    else:
        headers["authorization"] = f"Bearer {world.tokens.viewer}"
    assert browser.get("/v1/session", headers=headers).json()["role"] == "viewer"
    assert browser.get("/v1/jobs", headers=headers).status_code == 200
    shown = browser.get("/v1/jobs/a", headers=headers)
    assert shown.json()["request"]["env"] == {"KEY": "(hidden)"}
    assert browser.get("/v1/history", headers=headers).status_code == 403
    for path in ("/v1/jobs/a/cancel", "/v1/jobs/a/pause", "/v1/jobs", "/v1/plan", "/v1/shutdown"):
        refused = browser.post(path, headers=headers, content=b"{}")
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "Forbidden"), path
    assert browser.put("/v1/queues/q", headers=headers, json={"weight": 2}).status_code == 403
    assert browser.delete("/v1/session", headers=headers).status_code == 200


def test_a_wrong_token_signs_nobody_in(world, browser):
    for wrong in ("x", world.tokens.for_job("a")):
        refused = browser.post("/v1/session", json={"token": wrong})
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "Unauthorised")
        assert "set-cookie" not in refused.headers
    bodies: list[object] = [{}, {"token": 1}, {"token": "x", "more": 1}, [], {"token": "x" * 513}]
    for body in bodies:
        assert browser.post("/v1/session", json=body).status_code == 422
    browser.cookies.set(browser.app._sessions.cookie, "made-up")
    assert browser.get("/v1/session").status_code == 401


@pytest.mark.parametrize(
    "headers",
    [
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"origin": "http://evil.example"},
        {"origin": "http://127.0.0.1:1"},
        {"origin": "null"},
        {"origin": "http://["},
        {"origin": ""},
    ],
)
def test_no_page_of_another_address_signs_a_browser_in(world, browser, headers):
    """Else it could show somebody its own session as theirs, or see who has which token."""
    refused = browser.post("/v1/session", json={"token": world.tokens.viewer}, headers=headers)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "Forbidden")
    assert "set-cookie" not in refused.headers


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "", "text/json"]
)
def test_a_form_signs_nobody_in(world, browser, kind):
    body = json.dumps({"token": world.tokens.viewer})
    refused = browser.post("/v1/session", content=body, headers={"content-type": kind})
    assert (refused.status_code, refused.json()["error"]["code"]) == (422, "InvalidInput")
    assert "Content-Type: application/json" in refused.json()["error"]["message"]


def test_our_own_page_signs_in(world, browser):
    ours: list[dict[str, str]] = [
        {"origin": BASE},
        {"origin": BASE.replace("127.0.0.1", "LOCALHOST."), "host": "localhost:7341"},
        {"origin": "https://localhost", "host": "localhost:443"},
        {"origin": "https://proxy.example", "sec-fetch-site": "same-origin"},
        {"sec-fetch-site": "none"},
        {"content-type": "Application/JSON; charset=utf-8"},
    ]
    for headers in ours:
        answer = browser.post(
            "/v1/session",
            content=json.dumps({"token": world.tokens.viewer}),
            headers={"content-type": "application/json", **headers},
        )
        assert answer.status_code == 200, (headers, answer.text)


def test_nobody_makes_the_service_read_a_long_token(browser):
    kind = {"content-type": "application/json"}
    for body in (b"x" * 8193, iter([b"x" * 5000] * 2)):
        refused = browser.post("/v1/session", content=body, headers=kind)
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "TooLarge")


def test_both_tokens_are_made_at_the_first_start(tmp_path):
    home = tmp_path / "home"
    prepare_home(home)
    settings = ServiceSettings(home=home, store="memory", backend="inline")
    engine = build_engine(settings)
    engine.stop("keep")
    found = {name: (home / name).read_text().strip() for name in ("token", "viewer-token")}
    assert engine.tokens.role_of(found["token"]) == "operator"
    assert engine.tokens.role_of(found["viewer-token"]) == "viewer"
    assert all(stat.S_IMODE((home / name).stat().st_mode) == 0o600 for name in found)
    (home / "viewer-token").chmod(0o644)
    with pytest.raises(InvalidInput, match="viewer-token"):
        build_engine(settings)
