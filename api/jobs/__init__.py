"""Jobs: taken from the store, run in worker processes, and finished exactly once.

Names are loaded when first used: workers import this package too, and need no database.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwright.api.jobs.dispatcher import Dispatcher, Observation
    from shardwright.api.jobs.service import make_dispatcher

_HOMES = {
    "Dispatcher": "shardwright.api.jobs.dispatcher",
    "Observation": "shardwright.api.jobs.dispatcher",
    "make_dispatcher": "shardwright.api.jobs.service",
}

__all__ = ["Dispatcher", "Observation", "make_dispatcher"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
