"""Keys, scopes, owners, limits, and the guard of a server without keys."""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
from api_fixtures import PLAN, PROGRAM, URL, App
from fastapi.testclient import TestClient

import shardwright as sw
from shardwright.api.access import is_loopback
from shardwright.api.limits import RateLimiter

OpenApp = Callable[..., AbstractContextManager[App]]
OPEN_ROUTES = {"/healthz", "/readyz"}
"""What needs no key."""


def operations(app: App) -> list[tuple[str, str]]:
    """Every method and path of the OpenAPI document."""
    paths = app.client.get("/v1/openapi.json").json()["paths"]
    found = [(method, path) for path, methods in paths.items() for method in methods]
    assert len(found) >= 20
    return found


def fill(path: str, **ids: str) -> str:
    """A path with ids in it."""
    return re.sub(r"\{(\w+)\}", lambda match: ids[match[1]], path)


def ask(app: App, method: str, path: str, headers: dict[str, str] | None = None) -> Any:
    """The answer to a request with some body of the right kind."""
    bodies: dict[str, dict[str, Any]] = {
        "/v1/plans": {"json": PLAN},
        "/v1/programs": {"content": PROGRAM},
        "/v1/comparisons": {"json": {"model": PLAN["model"], "topologies": ["v5e:2x2"]}},
        "/v1/evaluations": {"json": PLAN | {"mesh": {"data": 4}}},
    }
    body = bodies[path] if method == "post" else {}
    return app.client.request(method, path, headers=headers, **body)


ABSENT = {
    "plan_id": "pln_" + "a" * 26,
    "program_id": "0" * 64,
    "comparison_id": "cmp_" + "a" * 26,
    "evaluation_id": "evl_" + "a" * 26,
    "chip": "v5e",
}


def test_every_route_but_health_needs_a_key_once_there_is_one(app: App) -> None:
    app.key("somebody")
    wrong = {"Authorization": "Bearer sw_" + "0" * 16 + "_" + "0" * 64}
    for method, path in operations(app):
        for headers in (None, wrong, {"Authorization": "Basic eDp5"}, {"Authorization": "Bearer"}):
            answer = ask(app, method, fill(path, **ABSENT), headers)
            if path in OPEN_ROUTES:
                assert answer.status_code == 200
                continue
            assert answer.status_code == 401, (method, path)
            assert answer.headers["www-authenticate"].startswith("Bearer")
            assert answer.headers["content-type"] == "application/problem+json"


def test_scopes_open_what_they_are_for(app: App) -> None:
    keys = {scope: app.key(scope, scope) for scope in ("read", "plan", "admin")}
    for method, path in operations(app):
        if path in OPEN_ROUTES:
            continue
        needed = "admin" if path == "/metrics" else "read" if method == "get" else "plan"
        for scope, headers in keys.items():
            answer = ask(app, method, fill(path, **ABSENT), headers)
            allowed = scope in (needed, "admin")
            assert (answer.status_code != 403) == allowed, (method, path, scope)


def test_owners_cannot_tell_what_others_have_from_what_is_absent(
    app: App, made_plan: sw.Plan
) -> None:
    """Every route that takes an id, found in the OpenAPI document so that none is forgotten."""
    mine, theirs = app.key("mine"), app.key("theirs")
    plan = app.submit(mine)
    app.finish(made_plan)
    compared = {"model": PLAN["model"], "topologies": ["v5e:2x2", "v5e:2x4"]}
    ids = {
        "plan_id": plan["id"],
        "program_id": app.client.post("/v1/programs", content=PROGRAM, headers=mine).json()["id"],
        "comparison_id": app.client.post("/v1/comparisons", json=compared, headers=mine).json()[
            "id"
        ],
        "evaluation_id": app.client.post(
            "/v1/evaluations", json=PLAN | {"mesh": {"data": 4}}, headers=mine
        ).json()["id"],
    }
    tried = 0
    for method, path in operations(app):
        names = re.findall(r"\{(\w+)\}", path)
        if not names or names == ["chip"]:
            continue
        # The one who owns it comes last, for that cancels it.
        foreign, absent = fill(path, **ids), fill(path, **ABSENT)
        hidden = app.client.request(method, foreign, headers=theirs)
        missing = app.client.request(method, absent, headers=theirs)
        assert hidden.status_code == missing.status_code == 404, (method, path)
        told = [
            answer.text.replace(given, "ID")
            for answer, values in ((hidden, ids), (missing, ABSENT))
            for given in [values[names[0]]]
        ]
        assert told[0] == told[1], (method, path)
        if not path.endswith("/events"):
            assert app.client.request(method, foreign, headers=mine).status_code == 200
        tried += 1
    assert tried >= 11
    assert app.client.get("/v1/plans", headers=theirs).json()["items"] == []


def test_remembered_results_are_not_shown_to_others(app: App, made_plan: sw.Plan) -> None:
    mine, theirs = app.key("mine"), app.key("theirs")
    at = app.submit(mine)["links"]["self"]
    app.finish(made_plan)
    for part in ("", "/plan.json", "/annotated", "/report"):
        assert app.client.get(at + part, headers=mine).status_code == 200
        etag = app.client.get(at + part, headers=mine).headers["etag"]
        for headers in (theirs, theirs | {"If-None-Match": etag}, theirs | {"If-None-Match": "*"}):
            assert app.client.get(at + part, headers=headers).status_code == 404


def test_owners_do_not_share_the_store_of_requests(app: App) -> None:
    mine, theirs = app.key("mine"), app.key("theirs")
    assert app.submit(mine)["id"] != app.submit(theirs)["id"]


def test_foreign_program_cannot_be_planned(app: App) -> None:
    mine, theirs = app.key("mine"), app.key("theirs")
    program = app.client.post("/v1/programs", content=PROGRAM, headers=mine).json()["id"]
    body = {"program": program, "topology": "v5e:2x2"}
    foreign = app.client.post("/v1/plans", json=body, headers=theirs)
    absent = app.client.post("/v1/plans", json=body | {"program": "0" * 64}, headers=theirs)
    assert foreign.status_code == absent.status_code == 422
    assert foreign.text.replace(program, "ID") == absent.text.replace("0" * 64, "ID")
    assert app.client.post("/v1/plans", json=body, headers=mine).status_code == 202


def test_keys_of_one_owner_see_the_same(app: App) -> None:
    first, second = app.key("a", owner="team"), app.key("b", owner="team")
    made = app.submit(first)
    assert app.client.get(made["links"]["self"], headers=second).status_code == 200
    again = app.client.post("/v1/plans", json=PLAN, headers=second)
    assert (again.status_code, again.json()["id"]) == (200, made["id"])


def test_admin_sees_all(app: App) -> None:
    mine, admin = app.key("mine"), app.key("admin", "admin")
    made = app.submit(mine)
    assert app.client.get(made["links"]["self"], headers=admin).status_code == 200
    assert len(app.client.get("/v1/plans", headers=admin).json()["items"]) == 1


def test_revoked_key_stops_within_two_seconds(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    key, text = app.store.keys.create("mine", ["read"])
    headers = {"Authorization": f"Bearer {text}"}
    assert app.client.get("/v1/plans", headers=headers).status_code == 200
    app.store.keys.revoke(key.id)
    monkeypatch.setattr("shardwright.api.access.time.monotonic", lambda: 1e12)
    assert app.client.get("/v1/plans", headers=headers).status_code == 401


def test_server_stays_closed_when_its_only_key_is_revoked(app: App) -> None:
    key, _ = app.store.keys.create("mine", ["read"])
    app.store.keys.revoke(key.id)
    assert app.client.get("/v1/plans").status_code == 401


def test_key_is_bound_to_its_rate(app: App) -> None:
    slow, other = app.key("slow", rate_limit_per_minute=3), app.key("other")
    statuses = [app.client.get("/v1/plans", headers=slow).status_code for _ in range(5)]
    assert statuses == [200, 200, 200, 429, 429]
    refused = app.client.get("/v1/plans", headers=slow)
    assert refused.json()["kind"] == "rate-limited"
    assert 1 <= int(refused.headers["retry-after"]) <= 20
    assert app.client.get("/v1/plans", headers=other).status_code == 200


def test_key_is_bound_to_its_quota_of_new_plans(app: App) -> None:
    headers = app.key("mine", plan_quota_per_day=2)
    for seed in (1, 2):
        app.submit(headers, seed=seed)
    refused = app.client.post("/v1/plans", json=PLAN | {"seed": 3}, headers=headers)
    assert (refused.status_code, refused.json()["kind"]) == (429, "quota-exceeded")
    assert 86_000 <= int(refused.headers["retry-after"]) <= 86_400
    # What is there already costs nothing.
    known = app.client.post("/v1/plans", json=PLAN | {"seed": 2}, headers=headers)
    assert known.status_code == 200


def test_bucket_gives_a_minutes_worth_and_then_an_even_rate() -> None:
    now = 0.0
    limiter = RateLimiter(clock=lambda: now)
    assert [limiter.take("k", 60) for _ in range(60)] == [0.0] * 60
    assert limiter.take("k", 60) == pytest.approx(1.0)
    now = 0.5
    assert limiter.take("k", 60) == pytest.approx(0.5)
    now = 1.0
    assert limiter.take("k", 60) == 0.0
    now = 1e6
    assert [limiter.take("k", 60) for _ in range(61)][-1] > 0
    assert limiter.take("none", 0) == 60.0


def test_cookie_reads_and_does_nothing_else(app: App) -> None:
    text = app.key("mine")["Authorization"].removeprefix("Bearer ")
    cookie = {"Cookie": f"shardwright_key={text}"}
    assert app.client.get("/v1/plans", headers=cookie).status_code == 200
    assert app.client.post("/v1/plans", json=PLAN, headers=cookie).status_code == 401


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:8080", "localhost:1", "[::1]:8080"])
def test_server_without_keys_answers_to_its_own_names(shared_app: App, host: str) -> None:
    assert shared_app.client.get("/v1/hardware", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "[", "10.0.0.1"]
)
def test_server_without_keys_refuses_other_names(shared_app: App, host: str) -> None:
    """DNS rebinding: a page whose name was pointed at this machine."""
    for path in ("/", "/healthz", "/v1/plans", "/metrics", "/v1/openapi.json"):
        answer = shared_app.client.get(path, headers={"Host": host})
        assert answer.status_code == 421, path


def test_server_without_keys_refuses_other_machines(shared_app: App) -> None:
    """However it came to listen there, and whatever host they name."""
    for address in ("10.0.0.7", "2001:db8::7"):
        other = TestClient(shared_app.client.app, base_url=URL, client=(address, 50000))
        for path in ("/", "/healthz", "/v1/plans"):
            assert other.get(path).status_code == 421, path


def test_server_with_keys_answers_other_machines(app: App) -> None:
    headers = app.key("mine")
    other = TestClient(app.client.app, base_url=URL, client=("10.0.0.7", 50000))
    assert other.get("/v1/plans", headers=headers).status_code == 200
    assert other.get("/v1/plans").status_code == 401


def test_server_without_keys_refuses_other_sites(app: App) -> None:
    """A form or script of another page may send this without asking first."""
    headers = {"Origin": "http://evil.example", "Content-Type": "text/plain"}
    answer = app.client.post("/v1/programs", content=PROGRAM, headers=headers)
    assert answer.status_code == 403
    own = app.client.post("/v1/programs", content=PROGRAM, headers={"Origin": "http://127.0.0.1"})
    assert own.status_code == 201


def test_server_with_keys_answers_to_any_name(app: App) -> None:
    headers = app.key("mine") | {"Host": "plans.example"}
    assert app.client.get("/v1/plans", headers=headers).status_code == 200


def test_no_answer_lets_other_sites_read_it(shared_app: App) -> None:
    origin = {"Origin": "http://127.0.0.1", "Access-Control-Request-Method": "POST"}
    for method in ("GET", "OPTIONS"):
        answer = shared_app.client.request(method, "/v1/plans", headers=origin)
        assert not [name for name in answer.headers if name.startswith("access-control-")]


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True), ("127.5.5.5", True), ("localhost", True), ("LOCALHOST.", True),
        ("::1", True), ("[::1]", True), ("0.0.0.0", False), ("::", False), ("10.0.0.1", False),
        ("localhost.example", False), ("", False),
    ],
)  # fmt: skip
def test_loopback_is_this_machine_alone(host: str, expected: bool) -> None:
    assert is_loopback(host) == expected


@pytest.mark.parametrize(
    "path",
    [
        "/v1/plans/x", "/v1/plans/pln_" + "a" * 25, "/v1/plans/pln_" + "A" * 26,
        "/v1/plans/pln_" + "a" * 27, "/v1/plans/cmp_" + "a" * 26, "/v1/plans/pln_" + "1" * 26,
        "/v1/plans/pln_" + "a" * 26 + "%0A", "/v1/plans/..%2f..%2fetc/plan.json",
        "/v1/programs/..", "/v1/programs/" + "g" * 64, "/v1/comparisons/x", "/v1/evaluations/x",
    ],
)  # fmt: skip
def test_ids_in_paths_are_checked(shared_app: App, path: str) -> None:
    answer = shared_app.client.get(path)
    assert answer.status_code in (404, 422)
    assert answer.headers["content-type"] == "application/problem+json"
