"""Plans over HTTP: accepted once, listed, cancelled, followed, read."""

import base64
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import pytest
from api_fixtures import PLAN, PROGRAM, App, events_of

import shardwright as sw

OpenApp = Callable[..., AbstractContextManager[App]]


def test_accepted_plan_is_queued_with_links_to_its_parts(app: App) -> None:
    answer = app.client.post("/v1/plans", json=PLAN)
    made = answer.json()
    at = f"/v1/plans/{made['id']}"
    assert (answer.status_code, made["status"]) == (202, "queued")
    assert answer.headers["location"] == made["links"]["self"] == at
    assert made["links"] == {
        "self": at, "events": f"{at}/events", "plan": f"{at}/plan.json",
        "annotated": f"{at}/annotated", "report": f"{at}/report", "page": f"/plans/{made['id']}",
    }  # fmt: skip
    assert app.client.get(at).json() == made


@pytest.mark.parametrize(
    "same",
    [
        {},
        {"topology": "v5litepod-4"},
        {"time_limit_s": 12, "seed": 0, "mesh": None, "pinned": {}},
        {"model": {"options": dict(reversed(PLAN["model"]["options"].items())), "name": "mlp"}},  # type: ignore[attr-defined]
    ],
)
def test_same_request_again_answers_from_the_store(app: App, same: dict[str, Any]) -> None:
    first = app.submit()
    again = app.client.post("/v1/plans", json=PLAN | same)
    assert (again.status_code, again.json()["id"]) == (200, first["id"])
    assert app.store.jobs.counts()["queued"] == 1


def test_same_request_answers_with_the_finished_plan(app: App, made_plan: sw.Plan) -> None:
    first = app.submit()
    app.finish(made_plan)
    again = app.client.post("/v1/plans", json=PLAN)
    assert (again.status_code, again.json()["status"]) == (200, "succeeded")
    assert again.json()["id"] == first["id"]


@pytest.mark.parametrize("other", [{"seed": 1}, {"memory_fraction": 0.5}, {"topology": "v5e:2x4"}])
def test_another_request_is_another_plan(app: App, other: dict[str, Any]) -> None:
    assert app.submit()["id"] != app.submit(**other)["id"]


def test_cancelled_plan_is_planned_anew(app: App) -> None:
    first = app.submit()
    cancelled = app.client.delete(first["links"]["self"])
    assert (cancelled.status_code, cancelled.json()["status"]) == (200, "cancelled")
    assert app.client.delete(first["links"]["self"]).json()["status"] == "cancelled"
    assert app.submit()["id"] != first["id"]


def test_finished_plan_cannot_be_cancelled(app: App, made_plan: sw.Plan) -> None:
    first = app.submit()
    app.finish(made_plan)
    assert app.client.delete(first["links"]["self"]).json()["status"] == "succeeded"


def test_full_queue_is_told_with_when_to_come_back(open_app: OpenApp) -> None:
    with open_app(queue_limit=2) as app:
        for seed in (1, 2):
            app.submit(seed=seed)
        full = app.client.post("/v1/plans", json=PLAN | {"seed": 3})
        assert (full.status_code, full.json()["kind"]) == (429, "queue-full")
        assert int(full.headers["retry-after"]) > 0
        assert app.client.post("/v1/plans", json=PLAN | {"seed": 2}).status_code == 200
        body = {"model": PLAN["model"], "topologies": ["v5e:2x2", "v5e:2x4"]}
        assert app.client.post("/v1/comparisons", json=body).status_code == 429
        assert app.client.post("/v1/programs", content=PROGRAM).status_code == 429


def test_comparison_that_does_not_fit_in_the_queue_leaves_nothing(open_app: OpenApp) -> None:
    with open_app(queue_limit=2) as app:
        body = {"model": PLAN["model"], "topologies": ["v5e:2x2", "v5e:2x4", "v5e:4x4"]}
        assert app.client.post("/v1/comparisons", json=body).status_code == 429
        assert app.store.jobs.counts()["queued"] == 0


def test_pages_of_plans_hold_each_once_newest_first(app: App) -> None:
    made = [app.submit(seed=seed)["id"] for seed in range(5)]
    seen: list[str] = []
    cursor: str | None = None
    while True:
        query = {"limit": 2} | ({"cursor": cursor} if cursor else {})
        page = app.client.get("/v1/plans", params=query).json()
        seen += [item["id"] for item in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert seen == made[::-1]


def test_plans_are_found_by_status_topology_model_and_program(app: App, made_plan: sw.Plan) -> None:
    done = app.submit()
    app.finish(made_plan)
    waiting = app.submit(topology="v5e:2x4")
    for query, expected in [
        ({"status": "succeeded"}, [done]),
        ({"status": "queued"}, [waiting]),
        ({"topology": "v5e:2x2"}, [done]),
        ({"topology": "v5litepod-4"}, [done]),
        ({"model": "mlp"}, [waiting, done]),
        ({"model": "mlp", "status": "failed"}, []),
        ({"program": "0" * 64}, []),
    ]:
        items = app.client.get("/v1/plans", params=query).json()["items"]
        assert [item["id"] for item in items] == [plan["id"] for plan in expected], query


def cursor(at: str, last: Any) -> str:
    """A cursor that somebody made up."""
    return base64.urlsafe_b64encode(json.dumps([at, last]).encode()).decode()


@pytest.mark.parametrize(
    ("at", "last"),
    [
        ("2026-01-01T00:00:00+00:00", "pln_\0"),
        ("2026-01-01T00:00:00+00:00", 5),
        ("2026-01-01T00:00:00", "pln_a"),
        ("0001-01-01T00:00:00+14:00", "pln_a"),
        ("9999-12-31T23:59:59-14:00", "pln_a"),
        ("now", "pln_a"),
    ],
)
def test_made_up_cursor_is_refused(shared_app: App, at: str, last: Any) -> None:
    answer = shared_app.client.get("/v1/plans", params={"cursor": cursor(at, last)})
    assert (answer.status_code, answer.json()["where"]) == (422, "cursor")


@pytest.mark.parametrize(
    "query",
    [
        {"limit": 0}, {"limit": 201}, {"limit": -1}, {"limit": "x"}, {"status": "lost"},
        {"cursor": "x"}, {"cursor": "e30"}, {"program": "x"}, {"sort": "up"}, {"topology": "\0"},
    ],
)  # fmt: skip
def test_wrong_queries_are_refused(shared_app: App, query: dict[str, Any]) -> None:
    answer = shared_app.client.get("/v1/plans", params=query)
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"


def test_parts_of_a_plan_that_waits_are_not_there_yet(app: App) -> None:
    at = app.submit()["links"]["self"]
    for part in ("plan.json", "annotated", "report"):
        answer = app.client.get(f"{at}/{part}")
        assert (answer.status_code, answer.json()["kind"]) == (409, "not-ready")
        assert int(answer.headers["retry-after"]) > 0


def test_parts_of_a_plan_that_failed_tell_why(app: App) -> None:
    at = app.submit()["links"]["self"]
    claim = app.store.jobs.claim("test", 60.0)
    assert claim is not None
    error = {"kind": "does-not-fit", "what": "it misses by 2 GB", "where": "v5e", "do": "Shrink"}
    app.store.jobs.fail(claim, error)
    answer = app.client.get(f"{at}/plan.json")
    assert answer.status_code == 409
    assert "it misses by 2 GB" in answer.json()["what"] and answer.json()["do"] == "Shrink"
    assert app.client.get(at).json()["error"]["kind"] == "does-not-fit"


def test_finished_plan_is_served_as_it_was_written(app: App, made_plan: sw.Plan) -> None:
    at = app.submit()["links"]["self"]
    app.finish(made_plan, annotated="module @here {}")
    plan = app.client.get(f"{at}/plan.json")
    assert plan.headers["content-type"] == "application/json"
    assert sw.Plan.from_json(plan.text).data == made_plan.data
    assert app.client.get(f"{at}/annotated").text == "module @here {}"
    report = app.client.get(f"{at}/report")
    assert report.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in report.headers["content-security-policy"]
    assert made_plan.data.program.name in report.text


@pytest.mark.parametrize("part", ["", "/plan.json", "/annotated", "/report"])
def test_what_never_changes_is_not_sent_twice(app: App, made_plan: sw.Plan, part: str) -> None:
    at = app.submit()["links"]["self"] + part
    app.finish(made_plan)
    first = app.client.get(at)
    etag = first.headers["etag"]
    assert "immutable" in first.headers["cache-control"]
    for known in (etag, f"W/{etag}", f'"other", {etag}', "*"):
        again = app.client.get(at, headers={"If-None-Match": known})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == etag
    assert app.client.get(at, headers={"If-None-Match": '"other"'}).content == first.content


@pytest.mark.parametrize(
    ("accepted", "packed"),
    [("gzip", True), ("br, GZIP;q=0.5", True), ("identity", False), ("gzip;q=0", False)],
)
def test_finished_plan_is_packed_for_those_who_take_it(
    app: App, made_plan: sw.Plan, accepted: str, packed: bool
) -> None:
    at = f"{app.submit()['links']['self']}/plan.json"
    app.finish(made_plan)
    plain = app.client.get(at, headers={"Accept-Encoding": "identity"})
    answer = app.client.get(at, headers={"Accept-Encoding": accepted})
    assert answer.content == plain.content
    assert answer.headers["vary"] == "Accept-Encoding"
    assert (answer.headers.get("content-encoding") == "gzip") == packed
    assert (answer.headers["etag"] != plain.headers["etag"]) == packed
    if packed:
        assert int(answer.headers["content-length"]) < len(plain.content) / 3


def test_plan_that_waits_may_not_be_cached(app: App) -> None:
    assert app.client.get(app.submit()["links"]["self"]).headers["cache-control"] == "no-store"


def test_events_tell_progress_and_end_with_the_plan(app: App, made_plan: sw.Plan) -> None:
    made = app.submit()
    app.finish(made_plan)
    answer = app.client.get(made["links"]["events"])
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = events_of(answer.text)
    assert [(seq, name) for seq, name, _ in events] == [
        (1, "progress"),
        (2, "progress"),
        (3, "done"),
    ]
    assert events[0][2]["stage"] == "trace" and events[1][2]["meshes_tried"] == 2
    assert events[2][2] == app.client.get(made["links"]["self"]).json()


@pytest.mark.parametrize(("last", "left"), [("0", [1, 2, 3]), ("1", [2, 3]), ("2", [3])])
def test_events_go_on_after_the_last_that_came(
    app: App, made_plan: sw.Plan, last: str, left: list[int]
) -> None:
    made = app.submit()
    app.finish(made_plan)
    answer = app.client.get(made["links"]["events"], headers={"Last-Event-ID": last})
    assert [seq for seq, _, _ in events_of(answer.text)] == left


def test_after_the_final_event_nothing_comes(app: App, made_plan: sw.Plan) -> None:
    made = app.submit()
    app.finish(made_plan)
    answer = app.client.get(made["links"]["events"], headers={"Last-Event-ID": "3"})
    assert (answer.status_code, answer.content) == (204, b"")


def test_events_that_never_came_are_not_waited_for(app: App, made_plan: sw.Plan) -> None:
    # A client may know of more events than a database that was restored from a backup.
    made = app.submit()
    ahead = {"Last-Event-ID": "1000"}
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(app.client.get, made["links"]["events"], headers=ahead)
        time.sleep(0.5)
        app.finish(made_plan)
        followed = events_of(answer.result(timeout=30).text)
    assert followed[-1][1] == "done"


def test_head_is_answered_as_get_without_its_body(app: App, made_plan: sw.Plan) -> None:
    made = app.submit()
    app.finish(made_plan)
    for path in ("/", "/healthz", "/v1/plans", made["links"]["plan"], made["links"]["page"]):
        head, get = app.client.head(path), app.client.get(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == get.headers["content-length"]
    assert app.client.head(made["links"]["events"]).status_code == 405  # it might never end


def test_method_that_is_not_allowed_is_told_those_that_are(app: App) -> None:
    answer = app.client.put("/v1/plans")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, POST")
    assert app.client.post(app.submit()["links"]["self"]).headers["allow"] == "DELETE, GET"


def test_one_caller_cannot_hold_every_connection(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwright.api.events._MOST_STREAMS", 0)
    answer = app.client.get(app.submit()["links"]["events"])
    assert (answer.status_code, answer.json()["kind"]) == (429, "rate-limited")


@pytest.mark.parametrize("last", ["-1", "x", "9" * 20])
def test_event_id_that_is_none_is_refused(app: App, last: str) -> None:
    made = app.submit()
    answer = app.client.get(made["links"]["events"], headers={"Last-Event-ID": last})
    assert answer.status_code == 422


def test_comparison_is_a_row_for_each_slice(app: App, made_plan: sw.Plan) -> None:
    known = app.submit()
    body = {"model": PLAN["model"], "topologies": ["v5litepod-8", "v5e:2x2"]}
    answer = app.client.post("/v1/comparisons", json=body)
    made = answer.json()
    assert (answer.status_code, made["status"]) == (202, "queued")
    assert [(row["topology"], row["chips"]) for row in made["rows"]] == [
        ("v5e:2x4", 8),
        ("v5e:2x2", 4),
    ]
    assert made["rows"][1]["plan"] == known["id"]
    again = app.client.post("/v1/comparisons", json=body)
    assert (again.status_code, again.json()["id"]) == (200, made["id"])
    at = answer.headers["location"]
    app.finish(made_plan)
    assert app.client.get(at).json()["status"] == "running"
    app.finish(made_plan)
    found = app.client.get(at).json()
    assert found["status"] == "succeeded"
    assert {row["summary"]["step_time_s"] for row in found["rows"]} == {
        made_plan.estimate.step_time_s
    }


def test_evaluation_has_its_estimate_once_it_is_done(app: App, made_plan: sw.Plan) -> None:
    body = PLAN | {"mesh": {"data": 4}, "in_specs": {"[1]['features']": "data,None"}}
    answer = app.client.post("/v1/evaluations", json=body)
    made = answer.json()
    assert (answer.status_code, made["estimate"]) == (202, None)
    assert made["request"]["in_specs"] == {"[1]['features']": [["data"], []]}
    claim = app.store.jobs.claim("test", 60.0)
    assert claim is not None
    estimate = made_plan.data.estimate.model_dump_json()
    app.store.files.write(f"evaluations/{made['id']}/estimate.json", estimate.encode())
    path = {"estimate.json": f"evaluations/{made['id']}/estimate.json"}
    app.store.jobs.finish(claim, {"step_time_s": 1.0}, path)
    found = app.client.get(answer.headers["location"]).json()
    assert found["status"] == "succeeded"
    assert found["estimate"] == json.loads(estimate)
    (_, name, data) = events_of(app.client.get(found["links"]["events"]).text)[-1]
    assert (name, data["estimate"]) == ("done", json.loads(estimate))


def test_evaluation_is_cancelled(app: App) -> None:
    body = PLAN | {"mesh": {"data": 4}}
    at = app.client.post("/v1/evaluations", json=body).headers["location"]
    assert app.client.delete(at).json()["status"] == "cancelled"


def test_catalog_lists_chips_slices_and_models(shared_app: App) -> None:
    chips = shared_app.client.get("/v1/hardware").json()["items"]
    assert [chip["name"] for chip in chips][:4] == ["v2", "v3", "v4", "v5e"]
    v5e = shared_app.client.get("/v1/hardware/v5e").json()
    products = {one["name"]: one["product_name"] for one in v5e["slices"]}
    assert products["v5e:16x16"] == "v5litepod-256"
    assert v5e["profile"]["hbm_bandwidth"]["source"]
    models = {one["name"]: one for one in shared_app.client.get("/v1/models").json()["items"]}
    assert models["llama3-8b"]["parameters"] == 8_030_261_248  # Llama 3 paper, table 3: 8B
    assert models["mlp"]["options"]["hidden"] == 16384


@pytest.mark.parametrize("chip", ["v9", "..", "v5e%00", "x" * 200])
def test_unknown_chip_is_refused(shared_app: App, chip: str) -> None:
    assert shared_app.client.get(f"/v1/hardware/{chip}").status_code in (404, 422)


def test_metrics_count_by_route_and_tell_the_queue(app: App) -> None:
    made = app.submit()
    app.client.get(made["links"]["self"])
    app.client.get("/v1/nothing")
    text = app.client.get("/metrics").text
    requests = "shardwright_http_requests_total"
    for line in [
        requests + '{method="POST",route="/v1/plans",status="202"} 1.0',
        requests + '{method="GET",route="/v1/plans/{plan_id}",status="200"} 1.0',
        requests + '{method="GET",route="none",status="404"} 1.0',
        "shardwright_queue_depth 1.0",
        "shardwright_jobs_running 0.0",
    ]:
        assert line in text.splitlines()


def test_metrics_have_names_by_the_conventions(app: App) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    app.submit()
    families = {
        family.name: family
        for family in text_string_to_metric_families(app.client.get("/metrics").text)
        if family.name.startswith("shardwright_")
    }
    assert families
    for name, family in families.items():
        assert family.documentation.endswith(".")
        if family.type == "counter":
            assert all(sample.name.endswith("_total") for sample in family.samples)
        if family.type == "histogram":
            assert name.endswith(("_seconds", "_ratio"))


def test_fault_tells_nothing_of_the_inside(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(app.store.jobs, "page", broken)
    answer = app.client.get("/v1/plans")
    assert (answer.status_code, answer.json()["kind"]) == (500, "internal")
    assert "secret" not in answer.text
