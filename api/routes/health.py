"""How the service is, for those who run it."""

from __future__ import annotations

import asyncio
import logging

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST
from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool

from shardwright.api.access import Admin
from shardwright.api.context import Here
from shardwright.api.facts_schemas import Health
from shardwright.api.problems import ACCESS, problem, responses, unavailable
from shardwright.version import VERSION

router = APIRouter(tags=["operations"])

_PING_SECONDS = 3.0
_log = logging.getLogger(__name__)


@router.get("/healthz", summary="Is it alive", responses=responses("misdirected"))
async def healthz() -> Health:
    """The process answers; nothing else is asked."""
    return Health(status="ok", version=VERSION)


@router.get("/readyz", summary="Can it work", responses=responses("misdirected", "unavailable"))
async def readyz(here: Here) -> Health:
    """The database answers, and jobs are done."""
    try:
        await asyncio.wait_for(run_in_threadpool(here.store.ping), _PING_SECONDS)
    except (SQLAlchemyError, TimeoutError) as error:
        _log.warning("not ready: %s", error)
        raise unavailable() from None
    if trouble := here.runner.trouble():
        raise problem(
            "unavailable",
            trouble,
            where="jobs",
            do="See the server's log",
            headers={"Retry-After": "5"},
        )
    return Health(status="ok", version=VERSION)


@router.get(
    "/metrics",
    summary="Metrics for Prometheus",
    response_class=Response,
    responses={
        **responses(*ACCESS),
        200: {
            "description": "In the text format of Prometheus",
            "content": {"text/plain": {"schema": {"type": "string"}}},
        },
    },
)
def metrics(here: Here, caller: Admin) -> Response:
    """Requests, the queue, jobs, failures; of this server, but for the queue."""
    return Response(here.metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})
