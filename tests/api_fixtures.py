"""The service's app in this process, over a store of its own, with nobody to do its jobs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

import shardwright as sw

if TYPE_CHECKING:
    from fastapi.testclient import TestClient

    from shardwright.api.store import Job, Store

URL = "http://127.0.0.1"
MLP = {"layers": 2, "batch": 256, "features": 256, "hidden": 512, "classes": 64}
PLAN = {"model": {"name": "mlp", "options": MLP}, "topology": "v5e:2x2"}
PROGRAM = (
    b"module @double {\n"
    b"  func.func public @main(%arg0: tensor<8x128xf32>) -> tensor<8x128xf32> {\n"
    b"    %0 = stablehlo.add %arg0, %arg0 : tensor<8x128xf32>\n"
    b"    return %0 : tensor<8x128xf32>\n  }\n}\n"
)


class IdleRunner:
    """Leaves every job in the queue."""

    def __init__(self) -> None:
        self.wakes = 0

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def wake(self) -> None:
        self.wakes += 1

    def trouble(self) -> str:
        return ""


class App:
    """A running app."""

    def __init__(self, client: TestClient) -> None:
        self.client = client
        self.store: Store = client.app.state.context.store  # type: ignore[attr-defined]

    def key(self, name: str, *scopes: str, **limits: Any) -> dict[str, str]:
        """Makes a key; the header that shows it."""
        _, text = self.store.keys.create(name, scopes or ("read", "plan"), **limits)
        return {"Authorization": f"Bearer {text}"}

    def submit(self, headers: dict[str, str] | None = None, **changes: Any) -> dict[str, Any]:
        """A plan that is queued."""
        answer = self.client.post("/v1/plans", json=PLAN | changes, headers=headers)
        assert answer.status_code == 202, answer.text
        return dict(answer.json())

    def finish(self, plan: sw.Plan, annotated: str = "module {}") -> Job:
        """Does the next job in the queue, as a worker would: two events and its files."""
        claim = self.store.jobs.claim("test", 60.0)
        assert claim is not None
        self.store.jobs.add_event(claim, {"stage": "trace", "meshes_tried": 0, "meshes": 0})
        self.store.jobs.add_event(claim, {"stage": "search", "meshes_tried": 2, "meshes": 2})
        files = {"plan.json": plan.to_json(), "annotated.mlir": annotated}
        paths = {name: f"plans/{claim.job.id}/{name}" for name in files}
        for name, text in files.items():
            self.store.files.write(paths[name], text.encode())
        summary = {"step_time_s": plan.estimate.step_time_s, "gap": plan.solver.gap}
        job = self.store.jobs.finish(claim, summary, paths)
        assert job is not None
        return job


@pytest.fixture(scope="session")
def made_plan() -> sw.Plan:
    """A plan of a small function."""
    import jax
    import jax.numpy as jnp

    def double(x: jax.Array) -> jax.Array:
        return x @ x

    given = jax.ShapeDtypeStruct((128, 128), jnp.float32)
    return sw.plan(double, given, topology="v5e:2x2", time_limit_s=1)


@contextmanager
def opened_app(folder: Path, **settings: Any) -> Iterator[App]:
    """An app with its store in a folder."""
    from fastapi.testclient import TestClient

    from shardwright.api.app import create_app
    from shardwright.api.settings import load_settings

    idle = patch("shardwright.api.app.make_dispatcher", lambda store, observe: IdleRunner())
    with (
        idle,
        TestClient(
            create_app(load_settings(data_dir=folder, **settings)),
            base_url=URL,
            client=("127.0.0.1", 50000),
            raise_server_exceptions=False,
        ) as client,
    ):
        yield App(client)


@pytest.fixture
def open_app(tmp_path: Path) -> Callable[..., AbstractContextManager[App]]:
    """Opens an app with settings: `with open_app(queue_limit=3) as app`."""
    return partial(opened_app, tmp_path / "data")


@pytest.fixture
def app(open_app: Callable[..., AbstractContextManager[App]]) -> Iterator[App]:
    """An app without keys."""
    with open_app() as opened:
        yield opened


@pytest.fixture(scope="module")
def shared_app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    """An app without keys, for tests that leave nothing behind."""
    with opened_app(tmp_path_factory.mktemp("app")) as opened:
        yield opened


def events_of(text: str) -> list[tuple[int, str, Any]]:
    """Server-sent events as (id, name, data)."""
    found = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
        if fields.get("event"):
            found.append((int(fields["id"]), fields["event"], json.loads(fields["data"])))
    return found
