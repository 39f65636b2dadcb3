"""Who asks: API keys, their scopes and limits, and the guard of servers without keys."""

from __future__ import annotations

import hashlib
import ipaddress
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import urlsplit

from fastapi import Depends, Request
from fastapi.security import HTTPBearer
from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from shardwright.api.limits import RateLimiter
from shardwright.api.problems import Problem, answer, problem
from shardwright.api.settings import Settings
from shardwright.api.store import Key, Store

KEY_COOKIE = "shardwright_key"
"""The cookie of people who signed in to the pages; counts for reading only."""
LOCAL_OWNER = "local"
"""Whose things are made while there are no keys."""

_SCOPES = ("read", "plan", "admin")
_REMEMBERED_S = 2.0
_MOST_REMEMBERED = 4096
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})


@dataclass(frozen=True)
class Caller:
    """Who asks.

    Attributes:
      key_id: of the key that was given; None where the server has no keys.
      owns: whose the things are that it makes.
      scopes: what it may do.
      rate_limit_per_minute, plan_quota_per_day: None is no limit.
    """

    key_id: str | None
    owns: str
    scopes: frozenset[str]
    rate_limit_per_minute: int | None = None
    plan_quota_per_day: int | None = None

    @property
    def owner(self) -> str | None:
        """Whose things it sees, as the store takes it; None is everybody's."""
        return None if self.key_id is not None and self.may("admin") else self.owns

    def may(self, scope: str) -> bool:
        """Whether it has a scope."""
        return "admin" in self.scopes or scope in self.scopes


class Gate:
    """Knows the keys, and remembers for a moment which are good.

    A key that is revoked stops to work within two seconds.
    """

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store = store
        self._settings = settings
        self._limiter = RateLimiter()
        self._callers: OrderedDict[bytes, tuple[float, Caller]] = OrderedDict()
        self._keyed = False
        self._keyed_until = 0.0

    async def keyed(self, *, fresh: bool = False) -> bool:
        """Whether requests need a key: for ever, once there was one.

        Args:
          fresh: asks the store, whatever was remembered.
        """
        if not self._keyed and (fresh or time.monotonic() >= self._keyed_until):
            self._keyed = await run_in_threadpool(self._store.keys.any)
            self._keyed_until = time.monotonic() + _REMEMBERED_S
        return self._keyed

    async def caller(self, text: str | None) -> Caller | None:
        """Who has a key; None where it is none, or none is given and one is needed."""
        # Who shows a key knows that there is one.
        if not await self.keyed(fresh=bool(text)):
            return Caller(None, LOCAL_OWNER, frozenset(_SCOPES))
        if not text:
            return None
        name = hashlib.sha256(text.encode()).digest()
        known = self._callers.get(name)
        if known is not None and known[0] > time.monotonic():
            return known[1]
        key = await run_in_threadpool(self._store.keys.authenticate, text)
        if key is None:
            self._callers.pop(name, None)
            return None
        found = self._of_key(key)
        self._callers[name] = (time.monotonic() + _REMEMBERED_S, found)
        if len(self._callers) > _MOST_REMEMBERED:
            self._callers.popitem(last=False)
        return found

    def spend(self, caller: Caller) -> None:
        """Counts a request against the rate limit of its key.

        Raises:
          Problem: it has no request left.
        """
        if caller.key_id is None or caller.rate_limit_per_minute is None:
            return
        wait = self._limiter.take(caller.key_id, caller.rate_limit_per_minute)
        if wait > 0:
            raise problem(
                "rate-limited",
                f"the key may ask {caller.rate_limit_per_minute} times a minute",
                where="key",
                do=f"Wait {math.ceil(wait)} s",
                headers={"Retry-After": str(math.ceil(wait))},
            )

    def _of_key(self, key: Key) -> Caller:
        rate, quota = key.rate_limit_per_minute, key.plan_quota_per_day
        own = self._settings
        return Caller(
            key_id=key.id,
            owns=key.owner,
            scopes=frozenset(key.scopes),
            rate_limit_per_minute=own.rate_limit_per_minute if rate is None else rate,
            plan_quota_per_day=own.plan_quota_per_day if quota is None else quota,
        )


async def caller_of(request: Request) -> Caller | None:
    """Who asks, by the Authorization header, or by the cookie of the pages where it only reads.

    Returns:
      None where a key is needed and no good one was given.
    """
    gate: Gate = request.app.state.gate
    scheme, _, text = request.headers.get("authorization", "").partition(" ")
    given = text.strip() if scheme.lower() == "bearer" else None
    if given is None and request.method in _SAFE:
        given = request.cookies.get(KEY_COOKIE)
    return await gate.caller(given)


_bearer = HTTPBearer(
    auto_error=False,
    scheme_name="key",
    description="a key that `shardwright keys create` made; a server without keys needs none",
)


def require(scope: str) -> Callable[..., Awaitable[Caller]]:
    """A dependency: who asks, who must have a scope and requests left.

    Args:
      scope: "read", "plan" or "admin".
    """

    async def allowed(request: Request, _: Annotated[Any, Depends(_bearer)]) -> Caller:
        found = await caller_of(request)
        if found is None:
            raise problem(
                "unauthenticated",
                "no key was given, or it is unknown or revoked",
                where="Authorization",
                do="Send the header Authorization: Bearer sw_... with a key of yours; "
                "`shardwright keys create` makes one",
                headers={"WWW-Authenticate": 'Bearer realm="shardwright"'},
            )
        request.app.state.gate.spend(found)
        if not found.may(scope):
            raise problem(
                "forbidden",
                f"the key lacks the scope {scope}",
                where="key",
                do=f"Use a key that was made with --scope {scope}",
            )
        return found

    return allowed


Reader = Annotated[Caller, Depends(require("read"))]
Planner = Annotated[Caller, Depends(require("plan"))]
Admin = Annotated[Caller, Depends(require("admin"))]


def is_loopback(host: str) -> bool:
    """Whether an address or name is this machine's own, reachable from nowhere else."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class LoopbackGuard:
    """Keeps everybody but this machine away from a server that asks for no keys.

    A page that somebody visits can send requests to their own machine, under a name that the
    page's owner points at it (DNS rebinding) or as a form. So while there are no keys, the client
    must be on this machine, the Host must be of this machine, and an Origin the server's own.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes on what is for this machine and answers the rest."""
        refusal = await self._refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await answer(Request(scope, receive), refusal)(scope, receive, send)

    async def _refusal(self, scope: Scope) -> Problem | None:
        try:
            if await scope["app"].state.gate.keyed():
                return None
        except SQLAlchemyError:  # nothing is given out without the database
            return None
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        client = scope.get("client")
        keys = "make keys with `shardwright keys create`"
        if client is not None and not is_loopback(client[0]):
            return problem(
                "misdirected",
                "a server without keys answers this machine alone",
                where="client",
                do=f"Ask from the machine itself, or {keys}",
            )
        if not is_loopback(_host_name(host)):
            return problem(
                "misdirected",
                f"a server without keys answers to this machine's own names, not to {host!r}",
                where="Host",
                do=f"Ask at http://127.0.0.1 or http://localhost, or {keys}",
            )
        if origin is not None and urlsplit(origin).netloc != host:
            return problem(
                "forbidden",
                "the request comes from a page of another site",
                where="Origin",
                do=f"Use the server's own pages, or {keys}",
            )
        return None


def _host_name(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
