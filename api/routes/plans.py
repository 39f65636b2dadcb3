"""Plans: asked for, followed, cancelled, read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool

from shardwright.api.access import Planner, Reader
from shardwright.api.bodies import body_schema, json_body
from shardwright.api.context import Context, Here
from shardwright.api.events import stream
from shardwright.api.problems import ACCESS, BODY, not_found, problem, responses
from shardwright.api.resources import plan_resource
from shardwright.api.results import Result, respond
from shardwright.api.schemas import (
    PLAN_ID,
    PlanPage,
    PlanRequest,
    PlanResource,
    ProgramId,
    ShortText,
    Status,
)
from shardwright.api.store import Job
from shardwright.errors import InputError
from shardwright.hardware_profiles import parse_slice

router = APIRouter(prefix="/v1/plans", tags=["plans"])

PlanId = Annotated[str, Path(pattern=PLAN_ID, description="of a plan")]
_ONE = responses(*ACCESS, "not-found", "input")
_PART = responses(*ACCESS, "not-found", "not-ready", "input")
_RETRY_S = 2


class PlanQuery(BaseModel):
    """Which plans to list."""

    model_config = ConfigDict(extra="forbid")

    status: Status | None = None
    topology: ShortText | None = Field(None, description="a slice, in any of its forms")
    model: ShortText | None = Field(None, description="name of a reference model")
    program: ProgramId | None = None
    cursor: Annotated[str, Field(max_length=400)] | None = Field(
        None, description="next_cursor of the page before"
    )
    limit: int = Field(50, ge=1, le=200)


@router.post(
    "",
    status_code=202,
    summary="Ask for a plan",
    response_description="Accepted; follow links.events",
    responses={
        200: {"model": PlanResource, "description": "The same was asked before: here it is"},
        **responses(*ACCESS, *BODY, "quota-exceeded"),
    },
    openapi_extra=body_schema(PlanRequest),
)
def submit(
    response: Response,
    here: Here,
    caller: Planner,
    body: Annotated[PlanRequest, Depends(json_body(PlanRequest))],
) -> PlanResource:
    """Plans a program or a reference model on a slice.

    The same request of the same owner is planned once: asked again it answers 200 with the plan
    that there is, whatever its status. What failed or was cancelled is planned anew.
    """
    request = here.checker.plan(caller.owns, body)
    job, created = here.store.jobs.submit(
        caller.owns,
        "plan",
        request,
        here.settings.queue_limit,
        key_id=caller.key_id,
        quota_per_day=caller.plan_quota_per_day,
    )
    made = plan_resource(job)
    response.headers["Location"] = made.links.self
    if created:
        here.runner.wake()
    else:
        response.status_code = 200
    return made


@router.get(
    "", summary="List plans", responses=responses(*ACCESS, "input"), response_model=PlanPage
)
def page(here: Here, caller: Reader, query: Annotated[PlanQuery, Query()]) -> PlanPage:
    """Plans of the key's owner, newest first."""
    topology = query.topology
    with contextlib.suppress(InputError):  # a slice of somebody's own chip, perhaps
        topology = topology and parse_slice(topology).name
    jobs, cursor = here.store.jobs.page(
        caller.owner,
        kind="plan",
        status=query.status,
        topology=topology,
        model=query.model,
        program=query.program,
        cursor=query.cursor,
        limit=query.limit,
    )
    return PlanPage(items=[plan_resource(job) for job in jobs], next_cursor=cursor)


@router.get(
    "/{plan_id}",
    summary="Look at a plan",
    response_model=PlanResource,
    responses={**_ONE, 304: {"description": "As the If-None-Match says"}},
)
async def get(request: Request, here: Here, caller: Reader, plan_id: PlanId) -> Response:
    """A plan's status, progress and figures."""
    known = here.results.get(caller.owner, plan_id, "resource")
    if known is not None:
        return respond(request, known)
    job = await run_in_threadpool(_plan, here, caller.owner, plan_id)
    content = plan_resource(job).model_dump_json().encode()
    if job.status != "succeeded":
        return Response(
            content, headers={"Cache-Control": "no-store"}, media_type="application/json"
        )
    # What has succeeded stays as it is.
    made = Result.of(job.owner, content, "application/json")
    here.results.put(plan_id, "resource", made)
    return respond(request, made)


@router.delete("/{plan_id}", summary="Cancel a plan", responses=_ONE)
def cancel(here: Here, caller: Planner, plan_id: PlanId) -> PlanResource:
    """Cancels a plan that has not ended; one that has stays as it is."""
    job = here.store.jobs.cancel(caller.owner, plan_id)
    if job is None:
        raise not_found("plan", plan_id)
    here.runner.wake()
    return plan_resource(job)


EVENTS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Events `progress` as they come, and a last one `done` with the result",
        "content": {
            "text/event-stream": {
                "schema": {
                    "type": "object",
                    "description": "one event; data is JSON",
                    "properties": {
                        "id": {"type": "string", "pattern": "^[0-9]+$"},
                        "event": {"type": "string", "enum": ["progress", "done"]},
                        "data": {"type": "string", "contentMediaType": "application/json"},
                    },
                    "required": ["id", "event", "data"],
                },
                "example": 'id: 1\nevent: progress\ndata: {"stage":"search","meshes_tried":3,'
                '"meshes":17,"best_step_s":0.212,"gap":0.01,"message":null}\n\n',
            }
        },
    },
    204: {"description": "Nothing came after Last-Event-ID and nothing will"},
}
LastEventId = Annotated[
    int | None,
    Header(ge=0, lt=1 << 31, description="id of the last event that came; goes on after it"),
]


@router.get(
    "/{plan_id}/events",
    summary="Follow a plan",
    responses={**_ONE, **EVENTS},
    response_class=Response,
)
async def events(
    here: Here,
    caller: Reader,
    plan_id: PlanId,
    last_event_id: LastEventId = None,
) -> Response:
    """A plan's progress as server-sent events, until it has ended."""
    return await follow(
        here,
        lambda: _plan(here, caller.owner, plan_id),
        lambda job: plan_resource(job).model_dump_json(),
        last_event_id or 0,
        caller.key_id or caller.owns,
    )


async def follow(
    here: Context,
    load: Callable[[], Job],
    show: Callable[[Job], str],
    after: int,
    caller: str,
) -> Response:
    """The events of a job; the last one has the job as `show` tells it.

    Args:
      load: reads the job, or raises.
      caller: who asked.
    """
    job = await run_in_threadpool(load)
    newest = await run_in_threadpool(here.store.jobs.newest_events, [job.id])
    # After a restored backup clients know of events that never came here: they go on after the
    # newest, for they would wait for ever else.
    after = min(after, newest.get(job.id, 0))
    if job.is_final and not await run_in_threadpool(here.store.jobs.events, job.id, after):
        return Response(status_code=204)
    here.hub.check_room(caller)
    return stream(here.hub, job.id, after, caller, lambda: show(load()))


@router.get(
    "/{plan_id}/plan.json",
    summary="The plan",
    response_class=Response,
    responses={
        **_PART,
        200: {
            "description": "The plan, as `shardwright plan -o` writes it",
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/PlanModel"}}},
        },
        304: {"description": "As the If-None-Match says"},
    },
)
async def plan_json(request: Request, here: Here, caller: Reader, plan_id: PlanId) -> Response:
    """The whole plan, which `shardwright.Plan.load` reads."""

    def make(job: Job) -> Result:
        return Result.of(job.owner, _file(here, job, "plan.json"), "application/json")

    return await _part(request, here, caller.owner, plan_id, "plan.json", make)


@router.get(
    "/{plan_id}/annotated",
    summary="The annotated program",
    response_class=Response,
    responses={
        **_PART,
        200: {
            "description": "StableHLO with the plan's shardings, which JAX compiles",
            "content": {
                "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
                "text/plain": {"schema": {"type": "string"}},
            },
        },
        304: {"description": "As the If-None-Match says"},
    },
)
async def annotated(request: Request, here: Here, caller: Reader, plan_id: PlanId) -> Response:
    """The program with the plan's shardings."""

    def make(job: Job) -> Result:
        content = _file(here, job, "annotated.mlir")
        binary = content[:4] == b"ML\xefR"
        name = f"{job.id}.mlirbc" if binary else f"{job.id}.mlir"
        return Result.of(
            job.owner,
            content,
            "application/octet-stream" if binary else "text/plain",
            Content_Disposition=f'attachment; filename="{name}"',
        )

    return await _part(request, here, caller.owner, plan_id, "annotated", make)


@router.get(
    "/{plan_id}/report",
    summary="The plan for people",
    response_class=Response,
    responses={
        **_PART,
        200: {
            "description": "One HTML page that needs nothing else",
            "content": {"text/html": {"schema": {"type": "string"}}},
        },
        304: {"description": "As the If-None-Match says"},
    },
)
async def report(request: Request, here: Here, caller: Reader, plan_id: PlanId) -> Response:
    """The plan as a page to read, print and pass on."""

    def make(job: Job) -> Result:
        from shardwright.planner.plan_schema import PlanModel
        from shardwright.reports.page import plan_page

        plan = PlanModel.model_validate_json(_file(here, job, "plan.json"))
        return Result.of(
            job.owner,
            plan_page(plan).encode(),
            "text/html",
            # Names in it are the uploader's: whatever the page holds, it may ask nobody for
            # anything, and its origin is nobody's.
            Content_Security_Policy="sandbox allow-scripts; default-src 'none'; "
            "style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; "
            "font-src data:; base-uri 'none'; form-action 'none'",
        )

    return await _part(request, here, caller.owner, plan_id, "report", make)


async def _part(
    request: Request,
    here: Context,
    owner: str | None,
    plan_id: str,
    part: str,
    make: Callable[[Job], Result],
) -> Response:
    known = here.results.get(owner, plan_id, part)
    if known is None:
        known = await run_in_threadpool(lambda: make(_finished(here, owner, plan_id)))
        here.results.put(plan_id, part, known)
    return respond(request, known)


def _plan(here: Context, owner: str | None, plan_id: str) -> Job:
    job = here.store.jobs.get(owner, plan_id)
    if job is None:
        raise not_found("plan", plan_id)
    return job


def _finished(here: Context, owner: str | None, plan_id: str) -> Job:
    job = _plan(here, owner, plan_id)
    if job.status in ("queued", "running"):
        raise problem(
            "not-ready",
            f"the plan is {job.status}",
            where=f"plan {plan_id}",
            do=f"Follow /v1/plans/{plan_id}/events until it is done",
            headers={"Retry-After": str(_RETRY_S)},
        )
    if job.status != "succeeded":
        reason = f": {(job.error or {}).get('what', '')}" if job.error else ""
        raise problem(
            "not-ready",
            f"the plan {'failed' if job.status == 'failed' else 'was cancelled'}{reason}",
            where=f"plan {plan_id}",
            do=str((job.error or {}).get("do") or "Ask for it again with POST /v1/plans"),
        )
    return job


def _file(here: Context, job: Job, name: str) -> bytes:
    content = here.store.read_result(job, name)
    if content is None:
        raise problem(
            "not-ready",
            f"the plan has no {name}",
            where=f"plan {job.id}",
            do="Plan it again; it was made by another version",
        )
    return content
