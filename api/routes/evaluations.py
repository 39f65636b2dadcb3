"""Evaluations: shardings written by hand, priced by the measure of plans."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Response

from shardwright.api.access import Planner, Reader
from shardwright.api.bodies import body_schema, json_body
from shardwright.api.context import Context, Here
from shardwright.api.problems import ACCESS, BODY, not_found, responses
from shardwright.api.resources import evaluation_resource
from shardwright.api.routes.plans import EVENTS, LastEventId, follow
from shardwright.api.schemas import EVALUATION_ID, EvaluationRequest, EvaluationResource
from shardwright.api.store import Job

router = APIRouter(prefix="/v1/evaluations", tags=["evaluations"])

EvaluationId = Annotated[str, Path(pattern=EVALUATION_ID, description="of an evaluation")]
_ONE = responses(*ACCESS, "not-found", "input")


@router.post(
    "",
    status_code=202,
    summary="Price a sharding",
    response_description="Accepted; follow links.events",
    responses={
        200: {"model": EvaluationResource, "description": "The same was asked before: here it is"},
        **responses(*ACCESS, *BODY),
    },
    openapi_extra=body_schema(EvaluationRequest),
)
def submit(
    response: Response,
    here: Here,
    caller: Planner,
    body: Annotated[EvaluationRequest, Depends(json_body(EvaluationRequest))],
) -> EvaluationResource:
    """Prices a sharding that a person wrote, on the best layout of its mesh on the slice."""
    request = here.checker.evaluation(caller.owns, body)
    job, created = here.store.jobs.submit(
        caller.owns, "evaluate", request, here.settings.queue_limit, key_id=caller.key_id
    )
    made = _resource(here, job)
    response.headers["Location"] = made.links.self
    if created:
        here.runner.wake()
    else:
        response.status_code = 200
    return made


@router.get("/{evaluation_id}", summary="Look at an evaluation", responses=_ONE)
def get(here: Here, caller: Reader, evaluation_id: EvaluationId) -> EvaluationResource:
    """An evaluation's status, and what the sharding costs once it is known."""
    return _resource(here, _job(here, caller.owner, evaluation_id))


@router.delete("/{evaluation_id}", summary="Cancel an evaluation", responses=_ONE)
def cancel(here: Here, caller: Planner, evaluation_id: EvaluationId) -> EvaluationResource:
    """Cancels an evaluation that has not ended; one that has stays as it is."""
    job = here.store.jobs.cancel(caller.owner, evaluation_id)
    if job is None:
        raise not_found("evaluation", evaluation_id)
    here.runner.wake()
    return _resource(here, job)


@router.get(
    "/{evaluation_id}/events",
    summary="Follow an evaluation",
    responses={**_ONE, **EVENTS},
    response_class=Response,
)
async def events(
    here: Here,
    caller: Reader,
    evaluation_id: EvaluationId,
    last_event_id: LastEventId = None,
) -> Response:
    """An evaluation's progress as server-sent events, until it has ended."""
    return await follow(
        here,
        lambda: _job(here, caller.owner, evaluation_id),
        lambda job: _resource(here, job).model_dump_json(),
        last_event_id or 0,
        caller.key_id or caller.owns,
    )


def _job(here: Context, owner: str | None, evaluation_id: str) -> Job:
    job = here.store.jobs.get(owner, evaluation_id)
    if job is None:
        raise not_found("evaluation", evaluation_id)
    return job


def _resource(here: Context, job: Job) -> EvaluationResource:
    found = here.store.read_result(job, "estimate.json") if job.status == "succeeded" else None
    return evaluation_resource(job, found)
