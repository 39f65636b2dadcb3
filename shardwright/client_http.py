"""Requests and responses of httpx, as flows have them."""

from __future__ import annotations

from typing import Any

import httpx

from shardwright.client_errors import Answer
from shardwright.client_exchange import Listen, Send
from shardwright.errors import InputError
from shardwright.version import VERSION

_SILENCE_S = 60.0
"""A stream of events that says nothing for so long, not even a comment, is broken."""
_EVENTS = "text/event-stream"


def checked_url(url: str) -> str:
    """A server's URL without a slash at its end.

    Raises:
      InputError: it is none.
    """
    do = "Write it as https://planner.example.com or http://127.0.0.1:8080"
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, TypeError) as error:
        reason = f"{url!r} is not the URL of a server ({error})"
        raise InputError(reason, where="server", do=do) from None
    if parsed.userinfo:
        raise InputError("a user's name is in the URL", where="server", do="Give an API key")
    extra = parsed.query or parsed.fragment or any(letter.isspace() for letter in url)
    if parsed.scheme not in ("http", "https") or not parsed.host or extra:
        raise InputError(f"{url!r} is not the URL of a server", where="server", do=do)
    return str(parsed).rstrip("/")


def settings(url: str, api_key: str | None, timeout_s: float) -> dict[str, Any]:
    """Options of httpx clients.

    Raises:
      InputError: this cannot be a key.
    """
    headers = {"User-Agent": f"shardwright/{VERSION}"}
    if api_key is not None:
        # The key itself must not reach a log by way of the message.
        if not api_key.isascii() or not api_key.isprintable() or not api_key.strip():
            raise InputError(
                "this cannot be an API key: it is empty or has characters that keys do not have",
                where="API key",
                do="Give it as `shardwright keys create` printed it",
            )
        headers["Authorization"] = f"Bearer {api_key.strip()}"
    return {"base_url": url, "headers": headers, "timeout": timeout_s}


def request(http: httpx.Client | httpx.AsyncClient, step: Send) -> httpx.Request:
    """A step as a request of httpx."""
    body: dict[str, Any] = {}
    if step.content is not None:
        body = {"content": step.content, "headers": {"Content-Type": "application/octet-stream"}}
    elif step.json is not None:
        body = {"json": step.json}
    return http.build_request(step.method, step.path, params=dict(step.params) or None, **body)


def listening(step: Listen, timeout: httpx.Timeout) -> dict[str, Any]:
    """Options of the request for a stream of events."""
    headers = {"Accept": _EVENTS} | ({"Last-Event-ID": step.last_id} if step.last_id else {})
    return {"headers": headers, "timeout": httpx.Timeout(timeout.connect, read=_SILENCE_S)}


def is_stream(response: httpx.Response) -> bool:
    """Whether events come."""
    return response.status_code == 200 and response.headers.get("content-type", "").startswith(
        _EVENTS
    )


def answer_of(response: httpx.Response) -> Answer:
    """A response that was read."""
    return Answer(response.status_code, response.headers, response.content, str(response.url))
