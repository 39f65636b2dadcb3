"""Who looks at the pages, and whether a form is really theirs.

Signing in puts the key in a cookie that scripts cannot read and that other sites cannot send. Every
form carries a random token that is also in such a cookie, and must come from the server's own
pages.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Literal
from urllib.parse import parse_qsl, urlsplit

from fastapi import Request, Response

from shardwright.api.access import KEY_COOKIE, Caller
from shardwright.api.problems import problem

FORM_COOKIE = "shardwright_form"
FORM_FIELD = "form_token"
_LARGEST_FORM = 64 * 1024
_MOST_FIELDS = 64
_TOKEN_BYTES = 32


class SignInNeededError(Exception):
    """Nobody is signed in, and the server has keys."""


async def visitor(request: Request) -> Caller:
    """Who looks, by the cookie of the sign-in; counts against the rate limit of their key.

    Raises:
      SignInNeededError: a key is needed, and the cookie has none or one that is no longer good.
      Problem: the key may not read, or has no request left.
    """
    gate = request.app.state.gate
    found: Caller | None = await gate.caller(request.cookies.get(KEY_COOKIE))
    if found is None:
        raise SignInNeededError
    gate.spend(found)
    if not found.may("read"):
        raise problem(
            "forbidden",
            "the key lacks the scope read",
            where="key",
            do="Sign in with a key that was made with --scope read",
        )
    return found


def from_another_site(request: Request) -> bool:
    """Whether a link of another site led here, so that browsers hold the cookie of the key back.

    Asking once more from here brings it.
    """
    return request.headers.get("sec-fetch-site") == "cross-site"


async def signed_in(request: Request) -> bool:
    """Whether there are keys at all, so that signing out means something."""
    return bool(await request.app.state.gate.keyed())


def form_token(request: Request) -> str:
    """The token of the forms of this browser; a new one at its first visit."""
    known = request.cookies.get(FORM_COOKIE, "")
    return known if len(known) >= _TOKEN_BYTES else secrets.token_urlsafe(_TOKEN_BYTES)


def keep_form_token(request: Request, response: Response, token: str) -> None:
    """Gives the browser its token."""
    if request.cookies.get(FORM_COOKIE) != token:
        _set_cookie(request, response, FORM_COOKIE, token, "lax")


def keep_key(request: Request, response: Response, key: str) -> None:
    """Signs in until the browser is closed."""
    _set_cookie(request, response, KEY_COOKIE, key, "strict")


def forget_key(response: Response) -> None:
    """Signs out."""
    response.delete_cookie(KEY_COOKIE, path="/")


def _set_cookie(
    request: Request, response: Response, name: str, value: str, same_site: Literal["lax", "strict"]
) -> None:
    response.set_cookie(
        name,
        value,
        path="/",
        httponly=True,
        samesite=same_site,
        secure=request.url.scheme == "https",
    )


async def read_form(request: Request) -> Mapping[str, str]:
    """The fields of a form that came from the server's own pages.

    Raises:
      Problem: it came from elsewhere, lacks the token, or is no form.
    """
    origin = request.headers.get("origin")
    foreign = origin is not None and urlsplit(origin).netloc != request.headers.get("host")
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _LARGEST_FORM:
            raise problem("too-large", "the form is too large", do="Shorten what you filled in")
    try:
        pairs = parse_qsl(
            body.decode(), keep_blank_values=True, max_num_fields=_MOST_FIELDS, errors="strict"
        )
    except ValueError:
        raise problem("malformed", "this is no form", do="Use the server's own pages") from None
    fields = dict(pairs)
    known = request.cookies.get(FORM_COOKIE, "")
    given = fields.pop(FORM_FIELD, "")
    matches = len(known) >= _TOKEN_BYTES and secrets.compare_digest(known.encode(), given.encode())
    if foreign or not matches:
        raise problem(
            "forbidden",
            "the form does not come from this server's pages, or its page is too old",
            do="Open the page again, allow its cookies, and send it from there",
        )
    return fields
