"""The API on Postgres: the same answers as on SQLite, whatever is sent."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from api_fixtures import PLAN, PROGRAM, App, events_of, opened_app
from service_fixtures import free_port

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


class Cable:
    """A connection to Postgres that can be pulled out and put back."""

    def __init__(self, port: int) -> None:
        self._target = port
        self.port = free_port()
        self._sockets: list[socket.socket] = []
        self.plug()

    def plug(self) -> None:
        listener = socket.create_server(("127.0.0.1", self.port))
        self._sockets = [listener]
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def pull(self) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                self._sockets += [near, far]
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=ends, daemon=True).start()

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)


def test_server_outlives_its_database_being_away(
    tmp_path_factory: pytest.TempPathFactory, postgres_url: str
) -> None:
    place = urlsplit(postgres_url)
    assert place.port is not None
    cable = Cable(place.port)
    url = postgres_url.replace(f":{place.port}/", f":{cable.port}/")
    with opened_app(tmp_path_factory.mktemp("away"), database_url=url) as app:
        headers = app.key("mine", owner="away")
        made = app.submit(headers, seed=21)
        assert app.client.get("/readyz").status_code == 200
        cable.pull()
        assert app.client.get("/healthz").status_code == 200
        for path in ("/readyz", "/v1/plans", made["links"]["self"], made["links"]["events"]):
            answer = app.client.get(path, headers=headers)
            assert (answer.status_code, answer.json()["kind"]) == (503, "unavailable"), path
        cable.plug()
        assert app.client.get("/readyz").status_code == 200
        assert app.client.get(made["links"]["self"], headers=headers).json() == made
    cable.pull()


def test_owners_are_apart_and_bound_by_quota(app: App) -> None:
    mine, theirs = app.key("mine", plan_quota_per_day=1), app.key("theirs")
    made = app.submit(mine, seed=11)
    assert app.client.get(made["links"]["self"], headers=theirs).status_code == 404
    refused = app.client.post("/v1/plans", json=PLAN | {"seed": 12}, headers=mine)
    assert (refused.status_code, refused.json()["kind"]) == (429, "quota-exceeded")
