"""Errors as problem details, `application/problem+json`.

Source: RFC 9457, Problem Details for HTTP APIs. Beside its members every problem says three
things: `what` was wrong, `where`, and what to `do` about it.
"""

from __future__ import annotations

import errno
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from starlette.exceptions import HTTPException
from starlette.routing import Match

from shardwright.api.store import QueueFullError, QuotaExceededError
from shardwright.errors import ShardwrightError

PROBLEM_JSON = "application/problem+json"
_TYPE = "urn:problem-type:shardwright:"
_MOST_ERRORS = 20
_RETRY_UNAVAILABLE_S = 5
_RETRY_QUEUE_S = 10

_log = logging.getLogger(__name__)

KINDS: dict[str, tuple[int, str]] = {
    "malformed": (400, "The request cannot be read"),
    "unauthenticated": (401, "A key is needed"),
    "forbidden": (403, "The key does not allow this"),
    "not-found": (404, "There is no such thing"),
    "method-not-allowed": (405, "The method is not allowed here"),
    "not-ready": (409, "The result is not there"),
    "too-large": (413, "The request is too large"),
    "unsupported-media-type": (415, "The content type is not supported"),
    "misdirected": (421, "The request is for another host"),
    "input": (422, "The input is wrong"),
    "rate-limited": (429, "Too many requests"),
    "quota-exceeded": (429, "The quota is used up"),
    "queue-full": (429, "The queue is full"),
    "internal": (500, "A fault of Shardwright itself"),
    "unavailable": (503, "The service cannot answer now"),
    "storage-full": (507, "The server has no room left"),
}
"""Status and title of each kind of problem."""


ACCESS = ("unauthenticated", "forbidden", "misdirected", "rate-limited", "unavailable")
"""What every route that needs a key may answer."""
BODY = ("malformed", "too-large", "unsupported-media-type", "input", "queue-full")
"""What every route that takes something in may answer besides."""


class FieldError(BaseModel):
    """One part of a request that is wrong."""

    where: str = Field(description="path of the part in the request, such as body.topology")
    what: str


class ProblemDetails(BaseModel):
    """What went wrong, as RFC 9457 has it, and what to do about it."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={
            "examples": [
                {
                    "type": f"{_TYPE}input",
                    "title": "The input is wrong",
                    "status": 422,
                    "detail": "topology: 'v5e:5x5' is not a slice of v5e. Use one of these, "
                    "nearest first: v5e:4x8, v5e:4x4, v5e:8x8.",
                    "instance": "/v1/plans",
                    "kind": "input",
                    "what": "'v5e:5x5' is not a slice of v5e",
                    "where": "topology",
                    "do": "use one of these, nearest first: v5e:4x8, v5e:4x4, v5e:8x8",
                }
            ]
        },
    )

    type: str = Field(description="a URI that names the kind of problem")
    title: str
    status: int
    detail: str = Field(description="the whole message: where, what, what to do")
    instance: str = Field(description="the path that was asked for")
    kind: str = Field(description="the last part of type, such as input or queue-full")
    what: str = Field(description="what was wrong")
    where: str = Field(description="where it was wrong; empty for the whole request")
    do: str = Field(description="what to do about it")
    errors: list[FieldError] | None = None


class Problem(Exception):
    """An answer that is an error.

    Args:
      kind: of `KINDS`, which gives status and title.
      error: what, where and what to do.
      headers: of the answer.
      errors: each part of the request that is wrong, where there are several.
    """

    def __init__(
        self,
        kind: str,
        error: ShardwrightError,
        *,
        headers: Mapping[str, str] | None = None,
        errors: Sequence[FieldError] = (),
    ) -> None:
        super().__init__(str(error))
        self.kind = kind
        self.error = error
        self.headers = dict(headers or {})
        self.errors = errors


def problem(
    kind: str, what: str, *, where: str = "", do: str = "", headers: Mapping[str, str] | None = None
) -> Problem:
    """A `Problem` from its three parts."""
    return Problem(kind, ShardwrightError(what, where=where, do=do), headers=headers)


def not_found(name: str, given: str) -> Problem:
    """The one answer to what is absent and to what belongs to somebody else."""
    return problem(
        "not-found",
        f"there is no {name} {given}",
        where=name,
        do="Check its id; what belongs to the owner of another key is not shown",
    )


def answer(request: Request, found: Problem) -> Response:
    """A problem as a response."""
    status, title = KINDS[found.kind]
    error = found.error
    details = ProblemDetails(
        type=_TYPE + found.kind,
        title=title,
        status=status,
        detail=str(error),
        instance=request.url.path,
        kind=found.kind,
        what=error.what,
        where=error.where,
        do=error.do,
        errors=list(found.errors) or None,
    )
    return Response(
        details.model_dump_json(exclude_none=True),
        status,
        headers={"Cache-Control": "no-store", **found.headers},
        media_type=PROBLEM_JSON,
    )


def field_errors(details: Iterable[Any]) -> list[FieldError]:
    """The errors of a pydantic validation, without the values that were given."""
    found = []
    for detail in details:
        where = ".".join(map(str, detail["loc"]))
        message = detail["msg"].removeprefix("Value error, ")
        found.append(FieldError(where=where[:200], what=message[:400]))
    return found[:_MOST_ERRORS]


def invalid(details: Iterable[Any], do: str) -> Problem:
    """A request whose parts have wrong values."""
    errors = field_errors(details)
    shown = "; ".join(f"{error.where}: {error.what}" for error in errors[:5])
    more = f"; and {len(errors) - 5} more" if errors[5:] else ""
    where = errors[0].where if len(errors) == 1 else "request"
    what = errors[0].what if len(errors) == 1 else shown + more
    return Problem("input", ShardwrightError(what, where=where, do=do), errors=errors)


def responses(*kinds: str) -> dict[int | str, dict[str, Any]]:
    """What OpenAPI says of the problems that a route may answer with."""
    found: dict[int | str, dict[str, Any]] = {}
    for kind in kinds:
        status, title = KINDS[kind]
        if status in found:
            found[status]["description"] += f", or: {title[0].lower()}{title[1:]}"
            continue
        schema = {"$ref": "#/components/schemas/ProblemDetails"}
        found[status] = {"description": title, "content": {PROBLEM_JSON: {"schema": schema}}}
        if status in (429, 503):
            found[status]["headers"] = {
                "Retry-After": {
                    "description": "seconds after which to try again",
                    "schema": {"type": "integer", "minimum": 1},
                }
            }
    return found


def install(app: FastAPI) -> None:
    """Makes every error of an app a problem."""

    async def on_problem(request: Request, error: Exception) -> Response:
        assert isinstance(error, Problem)
        return answer(request, error)

    async def on_input(request: Request, error: Exception) -> Response:
        assert isinstance(error, ShardwrightError)
        return answer(request, Problem("input", error))

    async def on_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return answer(request, invalid(error.errors(), "Correct it; see /v1/openapi.json"))

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return answer(request, _of_http(request, error))

    async def on_database(request: Request, error: Exception) -> Response:
        _log.error("the database failed: %s", error)
        return answer(request, unavailable())

    async def on_full(request: Request, error: Exception) -> Response:
        found = problem(
            "queue-full",
            "as many jobs wait as may",
            where="queue",
            do="Ask again when some of them are done",
            headers={"Retry-After": str(_RETRY_QUEUE_S)},
        )
        return answer(request, found)

    async def on_quota(request: Request, error: Exception) -> Response:
        assert isinstance(error, QuotaExceededError)
        seconds = max(1, math.ceil((error.until - datetime.now(UTC)).total_seconds()))
        found = problem(
            "quota-exceeded",
            "the key has asked for as many plans as it may in 24 hours",
            where="key",
            do=f"Ask again after {error.until.isoformat(timespec='seconds')}",
            headers={"Retry-After": str(seconds)},
        )
        return answer(request, found)

    async def on_system(request: Request, error: Exception) -> Response:
        assert isinstance(error, OSError)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            _log.error("no room is left: %s", error)
            return answer(request, storage_full())
        _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return await on_fault(request, error)

    async def on_fault(request: Request, error: Exception) -> Response:
        found = problem(
            "internal",
            f"{request.method} {request.url.path} failed",
            do="Report it with the time of the request; the server's log has the details",
        )
        return answer(request, found)

    app.add_exception_handler(Problem, on_problem)
    app.add_exception_handler(ShardwrightError, on_input)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(QueueFullError, on_full)
    app.add_exception_handler(QuotaExceededError, on_quota)
    app.add_exception_handler(OperationalError, on_database)
    app.add_exception_handler(InterfaceError, on_database)
    app.add_exception_handler(PoolTimeoutError, on_database)
    app.add_exception_handler(OSError, on_system)
    app.add_exception_handler(Exception, on_fault)


def storage_full() -> Problem:
    """The disk or the store of files has no room left."""
    return problem("storage-full", "the program cannot be kept", do="Tell the service's operator")


def unavailable() -> Problem:
    """The database does not answer."""
    return problem(
        "unavailable",
        "the database does not answer",
        do="Try again in some seconds; accepted jobs are kept",
        headers={"Retry-After": str(_RETRY_UNAVAILABLE_S)},
    )


def _of_http(request: Request, error: HTTPException) -> Problem:
    by_status = {400: "malformed", 404: "not-found", 405: "method-not-allowed", 413: "too-large"}
    kind = by_status.get(error.status_code, "malformed")
    what = {
        "not-found": f"there is nothing at {request.url.path}",
        "method-not-allowed": f"{request.method} is not allowed at {request.url.path}",
    }.get(kind, str(error.detail) or HTTPStatus(error.status_code).phrase)
    headers = dict(error.headers or {})
    if kind == "method-not-allowed":
        headers["Allow"] = ", ".join(_methods_at(request))
    return problem(kind, what, do="See /v1/openapi.json for what there is", headers=headers)


def _methods_at(request: Request) -> list[str]:
    """The methods of all routes of a path; an error of routing names those of the first alone."""
    return [
        method
        for method in ("DELETE", "GET", "POST")
        if any(
            route.matches({**request.scope, "method": method})[0] is Match.FULL
            for route in request.app.routes
        )
    ]
