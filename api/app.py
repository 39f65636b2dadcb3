"""The service: REST under /v1, pages for people, health and metrics."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic.json_schema import models_json_schema
from starlette.middleware import Middleware

from shardwright.api import problems
from shardwright.api.access import Gate, LoopbackGuard
from shardwright.api.catalog import Catalog
from shardwright.api.checks import Checker
from shardwright.api.context import Context
from shardwright.api.events import EventHub
from shardwright.api.head import HeadAsGet
from shardwright.api.jobs import make_dispatcher
from shardwright.api.metrics import Metrics, RequestMetrics
from shardwright.api.pages.routes import pages_router
from shardwright.api.routes import catalog, comparisons, evaluations, health, plans, programs
from shardwright.api.schemas import ComparisonRequest, EvaluationRequest, PlanRequest
from shardwright.api.settings import Settings, load_settings
from shardwright.api.store import Store
from shardwright.planner.plan_schema import PlanModel
from shardwright.planner.prices import load_prices
from shardwright.version import VERSION

_DESCRIPTION = """Plans the sharding of JAX programs on TPU slices.

Upload a program or name a reference model, ask for a plan on a slice, follow its events, and read
`plan.json` and the annotated program. Every error is `application/problem+json` and says what was
wrong, where, and what to do."""


def create_app(settings: Settings | None = None) -> FastAPI:
    """The service as an ASGI app; its store and workers live from its startup to its shutdown.

    Args:
      settings: from the environment where None.

    Raises:
      InputError: a setting is wrong.
    """
    own = load_settings() if settings is None else settings
    prices = None if own.prices_file is None else load_prices(own.prices_file.expanduser())
    metrics = Metrics()

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        store = Store.open(own)
        dispatcher = make_dispatcher(store, metrics.observe)
        hub = EventHub(store, metrics.event_streams)
        known = Catalog()
        app.state.gate = Gate(store, own)
        app.state.context = Context(
            settings=own,
            store=store,
            runner=dispatcher,
            hub=hub,
            metrics=metrics,
            catalog=known,
            prices=prices,
            checker=Checker(store, known, own.job_seconds),
        )
        metrics.watch_store(store, own.queue_limit)
        dispatcher.start()
        hub.start()
        try:
            yield
        finally:
            await hub.stop()
            dispatcher.stop()
            store.close()

    app = FastAPI(
        title="Shardwright",
        version=VERSION,
        summary="Plans the sharding of JAX programs on TPU slices",
        description=_DESCRIPTION,
        lifespan=lifespan,
        openapi_url="/v1/openapi.json",
        # FastAPI's own pages load their scripts from elsewhere.
        docs_url=None,
        redoc_url=None,
        middleware=[
            Middleware(HeadAsGet),
            Middleware(RequestMetrics),
            Middleware(LoopbackGuard),
        ],
        generate_unique_id_function=_operation_id,
    )
    app.state.metrics = metrics
    problems.install(app)
    # Routes are tried in order: what is asked for most comes first.
    for part in (plans, programs, comparisons, evaluations, catalog, health):
        app.include_router(part.router)
    app.include_router(pages_router, include_in_schema=False)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def _operation_id(route: APIRoute) -> str:
    """Names such as plans_submit, which generated clients call their functions."""
    return f"{route.endpoint.__module__.rpartition('.')[2]}_{route.name}"


def _openapi(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        made = get_openapi(
            title=app.title,
            version=app.version,
            summary=app.summary,
            description=app.description,
            routes=app.routes,
        )
        schemas = made["components"]["schemas"]
        schemas |= _schemas((PlanRequest, ComparisonRequest, EvaluationRequest), "validation")
        schemas |= _schemas((problems.ProblemDetails, PlanModel), "serialization")
        # FastAPI's own form of errors, which nothing here answers with.
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        app.openapi_schema = made
    return app.openapi_schema


def _schemas(models: Sequence[Any], mode: Any) -> dict[str, Any]:
    _, definitions = models_json_schema(
        [(model, mode) for model in models], ref_template="#/components/schemas/{model}"
    )
    return dict(definitions["$defs"])
