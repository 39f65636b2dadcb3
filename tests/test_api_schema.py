"""The OpenAPI document against the app: schemathesis finds no 5xx and nothing undocumented."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import pytest
import schemathesis
import uvicorn
from api_fixtures import PLAN, PROGRAM, App, IdleRunner, opened_app
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import positive_data_acceptance
from service_fixtures import free_port

import shardwright as sw
from shardwright.api.app import create_app
from shardwright.api.problems import ProblemDetails
from shardwright.api.schemas import PlanResource
from shardwright.api.settings import load_settings

EXAMPLES = 8
OPERATIONS = 20
REQUESTS = settings(
    max_examples=EXAMPLES,
    phases=[Phase.explicit, Phase.generate],
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, made_plan: sw.Plan) -> dict[str, Any]:
    """A store with one of everything: its folder, and the ids in it."""
    folder: Path = tmp_path_factory.mktemp("prepared")
    with opened_app(folder) as app:
        plan = app.submit()["id"]
        app.finish(made_plan)
        priced = app.client.post("/v1/evaluations", json=PLAN | {"mesh": {"data": 4}}).json()["id"]
        claim = app.store.jobs.claim("test", 60.0)
        assert claim is not None
        app.store.jobs.fail(claim, {"kind": "input", "what": "w", "where": "x", "do": "d"})
        compared = {"model": PLAN["model"], "topologies": ["v5e:2x2"]}
        ids = {
            "plan_id": plan,
            "evaluation_id": priced,
            "program_id": app.client.post("/v1/programs", content=PROGRAM).json()["id"],
            "comparison_id": app.client.post("/v1/comparisons", json=compared).json()["id"],
            "chip": "v5e",
        }
        headers = app.key("admin", "admin", rate_limit_per_minute=10**9, plan_quota_per_day=10**9)
    return {"folder": folder, "ids": ids, "headers": headers}


@pytest.fixture(scope="module")
def url(prepared: dict[str, Any]) -> Iterator[str]:
    """The app behind a real HTTP server, with nobody to do the jobs."""
    with patch("shardwright.api.app.make_dispatcher", lambda store, observe: IdleRunner()):
        app = create_app(load_settings(data_dir=prepared["folder"], queue_limit=50))
        port = free_port()
        server = uvicorn.Server(uvicorn.Config(app, port=port, log_config=None))
        thread = threading.Thread(target=server.run)
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
        server.should_exit = True
        thread.join()


def test_every_answer_is_documented(url: str, prepared: dict[str, Any]) -> None:
    """Valid and invalid requests to every operation, with ids that are there and that are not."""
    schema = schemathesis.openapi.from_url(f"{url}/v1/openapi.json")
    found: list[str] = []

    def known(case: Any) -> Any:
        given_ids = case.path_parameters or {}
        ids = {name: prepared["ids"].get(name, value) for name, value in given_ids.items()}
        case.path_parameters = ids
        return case

    def call(case: Any) -> None:
        # A text that looks like a slice need not be one.
        case.call_and_validate(
            excluded_checks=[positive_data_acceptance], headers=prepared["headers"], timeout=30
        )

    operations = [result.ok() for result in schema.get_all_operations()]
    for operation in operations:
        for mode in GenerationMode:
            cases = operation.as_strategy(generation_mode=mode)
            if mode == GenerationMode.POSITIVE:
                cases = st.one_of(cases, cases.map(known))
            check = REQUESTS(given(case=cases)(call))
            try:
                check()
            except Unsatisfiable:  # nothing about the operation can be wrong
                continue
            except FailureGroup as group:
                found += [f"{operation.label} {mode.name}: {e}" for e in group.exceptions]
    assert len(operations) >= OPERATIONS
    assert not found, "\n\n".join(found)


def test_document_has_every_part(shared_app: App) -> None:
    document = shared_app.client.get("/v1/openapi.json").json()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            name = f"{method} {path}"
            assert operation["summary"] and operation["description"], name
            for status, answer in operation["responses"].items():
                if int(status) >= 400:
                    assert list(answer["content"]) == ["application/problem+json"], name
            if path.startswith("/v1/") or path == "/metrics":
                assert {"401", "403", "429", "503"} <= operation["responses"].keys(), name
            if method == "post":
                assert {"400", "413", "415", "422"} <= operation["responses"].keys(), name
    for body in ("PlanRequest", "ComparisonRequest", "EvaluationRequest"):
        assert document["components"]["schemas"][body]["examples"], body


def test_examples_of_answers_have_their_form() -> None:
    for model in (PlanResource, ProblemDetails):
        (example,) = model.model_json_schema()["examples"]
        told = json.loads(model.model_validate(example).model_dump_json(exclude_none=True))
        assert told.keys() <= example.keys()
        assert set(model.model_fields) - {"errors"} <= example.keys()


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ("PlanRequest", "/v1/plans"),
        ("ComparisonRequest", "/v1/comparisons"),
        ("EvaluationRequest", "/v1/evaluations"),
    ],
)
def test_examples_of_the_document_are_accepted(app: App, body: str, path: str) -> None:
    document = app.client.get("/v1/openapi.json").json()
    for example in document["components"]["schemas"][body]["examples"]:
        answer = app.client.post(path, json=example)
        assert answer.status_code == 202, answer.text


def test_unknown_paths_and_methods_are_problems(url: str) -> None:
    for method, path, status in [
        ("GET", "/v1/nothing", 404),
        ("PUT", "/v1/plans", 405),
        ("PATCH", "/v1/hardware", 405),
        ("TRACE", "/healthz", 405),
    ]:
        answer = httpx.request(method, url + path)
        assert answer.status_code == status
        assert answer.headers["content-type"] == "application/problem+json"
        assert (status == 405) == ("allow" in answer.headers)
