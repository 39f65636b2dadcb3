"""What goes wrong between a client and a planning service, told as errors of Shardwright."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from shardwright.errors import DoesNotFitError, InputError, ServiceError, ShardwrightError

BUSY = frozenset({429, 502, 503, 504})
"""Answers after which the same request may succeed a little later."""
_SERVE = "Check the address; `shardwright serve` starts a server"


@dataclass(frozen=True)
class Answer:
    """A whole HTTP response."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    url: str

    def json(self) -> Any:
        """The body as JSON.

        Raises:
          ServiceError: it is not JSON, so whatever answered is not a planning service.
        """
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            raise _foreign(self) from None

    @property
    def is_problem(self) -> bool:
        """Whether it is an error in JSON, as a planning service tells them."""
        return "json" in self.headers.get("content-type", "")

    @property
    def retry_after_s(self) -> float:
        """Seconds that the server asks to wait, 0 where it does not."""
        text = self.headers.get("retry-after", "").strip()
        if text.isdecimal():
            return float(text)
        try:
            until = parsedate_to_datetime(text)
        except ValueError:
            return 0.0
        return max(0.0, (until.astimezone(UTC) - datetime.now(UTC)).total_seconds())


def error_of_answer(answer: Answer) -> ShardwrightError:
    """The error that an unsuccessful response tells (RFC 9457 problem details)."""
    if answer.status in range(300, 400):
        return ServiceError(
            f"the server redirects to {answer.headers.get('location', 'nowhere')}",
            kind="foreign",
            where=answer.url,
            do="Use the address that it redirects to",
        )
    if answer.status < 400:
        return _foreign(answer)
    if not answer.is_problem:
        if answer.status in BUSY:
            return _busy(answer, f"the server is not available (HTTP {answer.status})", "")
        return _foreign(answer)
    problem = answer.json()
    if not isinstance(problem, dict):
        return _foreign(answer)
    what = _text(problem, "what") or _text(problem, "detail") or _text(problem, "title")
    what = what or f"the server answers HTTP {answer.status}"
    where, do = _text(problem, "where"), _text(problem, "do")
    if answer.status in (401, 403):
        do = do or "Give an API key that may do this; the server's owner makes them"
        return ServiceError(what, kind="unauthorized", where=where or answer.url, do=do)
    if answer.status in BUSY:
        return _busy(answer, what, do)
    if answer.status >= 500:
        return ServiceError(what, kind="internal", where=where or answer.url, do=do)
    return InputError(what, where=where or answer.url, do=do)


def error_of_job(problem: Mapping[str, Any] | None, job: str) -> ShardwrightError:
    """The error that a failed job tells."""
    problem = problem or {}
    kind = _text(problem, "kind") or "internal"
    what = _text(problem, "what") or _text(problem, "detail") or "the server does not say why"
    where, do = _text(problem, "where"), _text(problem, "do")
    if kind == "input":
        return InputError(what, where=where, do=do)
    if kind == "does-not-fit":
        return DoesNotFitError(
            what,
            where=where,
            do=do,
            least_bytes=_number(problem, "least_bytes"),
            limit_bytes=_number(problem, "limit_bytes"),
        )
    return ServiceError(what, kind=kind, where=where or job, do=do)


def error_of_transport(error: httpx.TransportError, url: str) -> ServiceError:
    """The error of a request that had no answer."""
    if isinstance(error, httpx.ConnectTimeout | httpx.ConnectError):
        what = f"no server answers ({_reason(error)})"
    elif isinstance(error, httpx.TimeoutException):
        what = f"the server did not answer in time ({_reason(error)})"
    else:
        what = f"the connection broke ({_reason(error)})"
    return ServiceError(what, kind="unreachable", where=url, do=_SERVE)


def _busy(answer: Answer, what: str, do: str) -> ServiceError:
    do = do or "Try again later"
    return ServiceError(what, kind="busy", where=answer.url, do=do)


def _foreign(answer: Answer) -> ServiceError:
    kind = answer.headers.get("content-type", "").split(";")[0] or "nothing"
    return ServiceError(
        f"what answers is not a Shardwright server (HTTP {answer.status}, {kind})",
        kind="foreign",
        where=answer.url,
        do=_SERVE,
    )


def _reason(error: Exception) -> str:
    told = " ".join(str(error).split())
    return told[:200] or type(error).__name__


def _text(problem: Mapping[str, Any], key: str) -> str:
    value = problem.get(key)
    return value if isinstance(value, str) else ""


def _number(problem: Mapping[str, Any], key: str) -> float | None:
    value = problem.get(key)
    return float(value) if isinstance(value, int | float) else None
