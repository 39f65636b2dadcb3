"""Names of things: unguessable, and digests of requests."""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from typing import Any

from shardwright.version import VERSION

_ORDERED = frozenset({"mesh", "in_specs", "out_specs"})
"""Where the order of keys means something: major to minor, and which pattern matches first."""


def new_id(prefix: str) -> str:
    """A prefix and 26 characters of base32: 130 bits that nobody guesses."""
    return prefix + base64.b32encode(secrets.token_bytes(20)).decode().lower()[:26]


@cache
def versions() -> dict[str, str]:
    """What decides how a request is planned, besides the request."""
    return {"shardwright": VERSION, "jax": version("jax"), "jaxlib": version("jaxlib")}


def request_digest(kind: str, request: Mapping[str, Any]) -> str:
    """SHA-256 of a request; the same for requests that ask for the same."""
    text = json.dumps([kind, _sorted(request), versions()], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _sorted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            key: list(inner.items())
            if key in _ORDERED and isinstance(inner, Mapping)
            else _sorted(inner)
            for key, inner in sorted(value.items())
        }
    return [_sorted(inner) for inner in value] if isinstance(value, list | tuple) else value
