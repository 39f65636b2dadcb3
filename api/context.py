"""What routes work with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Protocol

from fastapi import Depends, Request

from shardwright.api.catalog import Catalog
from shardwright.api.checks import Checker
from shardwright.api.events import EventHub
from shardwright.api.metrics import Metrics
from shardwright.api.results import ResultCache
from shardwright.api.settings import Settings
from shardwright.api.store import Store
from shardwright.planner.prices import Prices


class Runner(Protocol):
    """What has accepted jobs done."""

    def wake(self) -> None:
        """Has it look at the queue now."""

    def trouble(self) -> str:
        """Why jobs do not run, in one line; empty where all is well."""


@dataclass(frozen=True)
class Context:
    """The parts of a running app."""

    settings: Settings
    store: Store
    runner: Runner
    hub: EventHub
    metrics: Metrics
    catalog: Catalog
    checker: Checker
    results: ResultCache = field(default_factory=ResultCache)
    prices: Prices | None = None


# Not a plain function, which FastAPI would run in a thread.
async def _context(request: Request) -> Context:
    found: Context = request.app.state.context
    return found


Here = Annotated[Context, Depends(_context)]
