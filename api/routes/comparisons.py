"""Comparisons: one program or model planned on many slices."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Response

from shardwright.api.access import Planner, Reader
from shardwright.api.bodies import body_schema, json_body
from shardwright.api.context import Here
from shardwright.api.problems import ACCESS, BODY, not_found, responses
from shardwright.api.resources import comparison_resource
from shardwright.api.schemas import COMPARISON_ID, ComparisonRequest, ComparisonResource

router = APIRouter(prefix="/v1/comparisons", tags=["comparisons"])


@router.post(
    "",
    status_code=202,
    summary="Compare slices",
    response_description="Accepted; each row is a plan of its own",
    responses={
        200: {"model": ComparisonResource, "description": "The same was asked before: here it is"},
        **responses(*ACCESS, *BODY, "quota-exceeded"),
    },
    openapi_extra=body_schema(ComparisonRequest),
)
def submit(
    response: Response,
    here: Here,
    caller: Planner,
    body: Annotated[ComparisonRequest, Depends(json_body(ComparisonRequest))],
) -> ComparisonResource:
    """Plans one program or reference model on several slices; all of them are queued or none.

    The plans are ordinary ones: those that there are already are not made again.
    """
    request, plans = here.checker.comparison(caller.owns, body)
    comparison, created = here.store.comparisons.create(
        caller.owns,
        request,
        plans,
        here.settings.queue_limit,
        key_id=caller.key_id,
        quota_per_day=caller.plan_quota_per_day,
    )
    made = comparison_resource(comparison, here.store.comparisons.jobs(comparison))
    response.headers["Location"] = made.links.self
    if created:
        here.runner.wake()
    else:
        response.status_code = 200
    return made


@router.get(
    "/{comparison_id}",
    summary="Look at a comparison",
    responses=responses(*ACCESS, "not-found", "input"),
)
def get(
    here: Here,
    caller: Reader,
    comparison_id: Annotated[str, Path(pattern=COMPARISON_ID, description="of a comparison")],
) -> ComparisonResource:
    """The table: one row a slice, in the order asked."""
    found = here.store.comparisons.get(caller.owner, comparison_id)
    if found is None:
        raise not_found("comparison", comparison_id)
    return comparison_resource(found, here.store.comparisons.jobs(found))
