"""The API on Postgres: the same answers as on SQLite, whatever is sent."""

from collections.abc import Iterator

import pytest
from api_fixtures import PLAN, PROGRAM, App, events_of, opened_app

import shardwright as sw


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory, postgres_url: str) -> Iterator[App]:
    with opened_app(tmp_path_factory.mktemp("app"), database_url=postgres_url) as opened:
        yield opened


def test_plan_is_accepted_once_finished_and_followed(app: App, made_plan: sw.Plan) -> None:
    made = app.submit()
    again = app.client.post("/v1/plans", json=PLAN)
    assert (again.status_code, again.json()["id"]) == (200, made["id"])
    app.finish(made_plan)
    done = app.client.get(made["links"]["self"]).json()
    assert done["status"] == "succeeded"
    events = events_of(app.client.get(made["links"]["events"]).text)
    assert [(seq, name) for seq, name, _ in events] == [
        (1, "progress"),
        (2, "progress"),
        (3, "done"),
    ]
    assert events[-1][2] == done
    assert sw.Plan.from_json(app.client.get(done["links"]["plan"]).text).data == made_plan.data


def test_order_of_the_mesh_is_kept(app: App) -> None:
    meshes = [{"b": 2, "a": 2}, {"a": 2, "b": 2}]
    made = [app.submit(mesh=mesh, seed=7) for mesh in meshes]
    assert made[0]["id"] != made[1]["id"]
    for mesh, plan in zip(meshes, made, strict=True):
        kept = app.client.get(plan["links"]["self"]).json()["request"]["mesh"]
        assert list(kept.items()) == list(mesh.items())
        assert app.client.delete(plan["links"]["self"]).json()["status"] == "cancelled"


def test_pages_hold_each_plan_once(app: App) -> None:
    made = [app.submit(seed=seed, memory_fraction=0.5)["id"] for seed in range(5)]
    seen: list[str] = []
    query: dict[str, str | int] = {"limit": 2, "status": "queued"}
    while True:
        page = app.client.get("/v1/plans", params=query).json()
        seen += [item["id"] for item in page["items"]]
        if page["next_cursor"] is None:
            break
        query["cursor"] = page["next_cursor"]
    assert seen == made[::-1]


def test_programs_and_comparisons_are_kept(app: App) -> None:
    for status in (201, 200):
        assert app.client.post("/v1/programs", content=PROGRAM).status_code == status
    body = {"model": PLAN["model"], "topologies": ["v5e:2x4", "v5e:4x4"]}
    made = app.client.post("/v1/comparisons", json=body)
    assert made.status_code == 202
    rows = app.client.get(made.headers["location"]).json()["rows"]
    assert [row["topology"] for row in rows] == body["topologies"]


def test_text_that_postgres_refuses_is_refused_before(app: App) -> None:
    """It takes no NUL in any text."""
    for query in ({"model": "\0"}, {"topology": "\0"}, {"cursor": "\0"}):
        assert app.client.get("/v1/plans", params=query).status_code == 422
    for path in ("a\0", "\x7f"):
        body = PLAN | {"mesh": {"a": 4}, "pinned": {path: [["a"]]}}
        assert app.client.post("/v1/plans", json=body).status_code == 422


def test_owners_are_apart_and_bound_by_quota(app: App) -> None:
    mine, theirs = app.key("mine", plan_quota_per_day=1), app.key("theirs")
    made = app.submit(mine, seed=11)
    assert app.client.get(made["links"]["self"], headers=theirs).status_code == 404
    refused = app.client.post("/v1/plans", json=PLAN | {"seed": 12}, headers=mine)
    assert (refused.status_code, refused.json()["kind"]) == (429, "quota-exceeded")
