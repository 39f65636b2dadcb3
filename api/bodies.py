"""JSON bodies of requests: bounded, strict, and described in OpenAPI."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from shardwright.api.problems import Problem, field_errors, invalid, problem

_MOST_BYTES = 2 << 20
_Body = TypeVar("_Body", bound=BaseModel)


def json_body(schema: type[_Body]) -> Callable[[Request], Awaitable[_Body]]:
    """A dependency: the body of a request as a model.

    Pydantic's own parser reads it, which bounds the depth of nesting and knows no NaN where the
    schema allows none, and the bytes are counted before.
    """

    async def read(request: Request) -> _Body:
        given = request.headers.get("content-type", "")
        if given.partition(";")[0].strip().lower() != "application/json":
            raise problem(
                "unsupported-media-type",
                f"the body is {given[:100] or 'of no type'}",
                where="Content-Type",
                do="Send JSON with the header Content-Type: application/json",
            )
        content = bytearray()
        try:
            async for chunk in request.stream():
                content += chunk
                if len(content) > _MOST_BYTES:
                    raise _too_large()
        except ClientDisconnect:
            raise problem("malformed", "the body ended before its end", where="body") from None
        try:
            return schema.model_validate_json(bytes(content))
        except ValidationError as error:
            raise _refusal(error) from None

    return read


def body_schema(schema: type[BaseModel]) -> dict[str, Any]:
    """What OpenAPI says of a route with such a body."""
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema.__name__}"}}}
    return {"requestBody": {"required": True, "content": content}}


def _refusal(error: ValidationError) -> Problem:
    details = error.errors(include_url=False, include_input=False, include_context=False)
    if details[0]["type"] == "json_invalid":
        (told,) = field_errors(details[:1])
        return problem("malformed", told.what, where="body", do="Send well-formed JSON in UTF-8")
    placed = [detail | {"loc": ("body", *detail["loc"])} for detail in details]
    return invalid(placed, "Correct it; /v1/openapi.json describes the body")


def _too_large() -> Problem:
    return problem(
        "too-large",
        f"a JSON body has at most {_MOST_BYTES} bytes",
        where="body",
        do="Give patterns instead of single paths",
    )
