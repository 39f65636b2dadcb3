"""Programs: uploaded, and what they are."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Request, Response
from starlette.concurrency import run_in_threadpool

from shardwright.api.access import Planner, Reader
from shardwright.api.context import Here
from shardwright.api.facts_schemas import ProgramResource
from shardwright.api.problems import ACCESS, BODY, not_found, problem, responses
from shardwright.api.resources import program_resource
from shardwright.api.schemas import PROGRAM_ID
from shardwright.api.uploads import receive

router = APIRouter(prefix="/v1/programs", tags=["programs"])

_TYPES = ("application/octet-stream", "text/plain")
_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "a jax.export artifact, or StableHLO as text or bytecode",
        "content": {
            "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
            "text/plain": {
                "schema": {"type": "string"},
                "example": "module @double { func.func public @main(%arg0: tensor<8x128xf32>) -> "
                "tensor<8x128xf32> { %0 = stablehlo.add %arg0, %arg0 : tensor<8x128xf32> "
                "return %0 : tensor<8x128xf32> } }",
            },
        },
    }
}


@router.post(
    "",
    status_code=201,
    summary="Upload a program",
    response_description="Taken in; it is looked into by a job",
    responses={
        200: {"model": ProgramResource, "description": "This owner has uploaded it before"},
        **responses(*ACCESS, *BODY, "storage-full"),
    },
    openapi_extra=_BODY,
)
async def upload(
    request: Request, response: Response, here: Here, caller: Planner
) -> ProgramResource:
    """Takes in a program, named by the SHA-256 of its bytes.

    It is streamed to disk, recognised by its first bytes, and read by a worker process; nothing of
    it is ever executed.
    """
    given = request.headers.get("content-type", _TYPES[0]).partition(";")[0].strip().lower()
    if given not in _TYPES:
        raise problem(
            "unsupported-media-type",
            f"the body is {given[:100]}",
            where="Content-Type",
            do="Send the bytes with the header Content-Type: application/octet-stream",
        )
    with here.store.upload_file() as path:
        got = await receive(request, path, here.settings.max_upload_bytes)
        program, created = await run_in_threadpool(
            here.store.programs.add,
            caller.owns,
            got.program_id,
            path,
            got.kind,
            here.settings.queue_limit,
            caller.key_id,
        )
    here.metrics.uploaded.inc(got.nbytes)
    made = program_resource(program)
    response.headers["Location"] = made.links.self
    if created:
        here.runner.wake()
    else:
        response.status_code = 200
    return made


@router.get(
    "/{program_id}",
    summary="Look at a program",
    responses=responses(*ACCESS, "not-found", "input"),
)
def get(
    here: Here,
    caller: Reader,
    program_id: Annotated[str, Path(pattern=PROGRAM_ID, description="of a program")],
) -> ProgramResource:
    """A program's inputs, outputs and counts of operations, once it was looked into."""
    found = here.store.programs.get(caller.owner, program_id)
    if found is None:
        raise not_found("program", program_id)
    return program_resource(found)
