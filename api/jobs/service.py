"""The dispatcher that settings ask for."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from shardwright.api.jobs.dispatcher import Dispatcher, Observation
from shardwright.api.jobs.engine import Engine, Limits
from shardwright.api.jobs.local import LocalEngine
from shardwright.api.jobs.ray_engine import RayEngine
from shardwright.api.jobs.scratch import open_scratch
from shardwright.api.settings import Settings
from shardwright.api.store.store import Store


def make_dispatcher(
    store: Store, observe: Callable[[Observation], None] = lambda observation: None
) -> Dispatcher:
    """A dispatcher of a store's jobs, not started yet.

    Args:
      observe: called from the dispatcher's thread with what becomes of jobs here.

    """
    scratch = open_scratch(store.settings.data_dir / "scratch")
    return Dispatcher(store, make_engine(store.settings, scratch), scratch, observe)


def make_engine(settings: Settings, scratch: Path) -> Engine:
    """The engine that settings ask for."""
    limits = Limits(settings.job_memory_bytes, settings.job_seconds)
    if settings.engine == "ray":
        return RayEngine(settings.workers, limits, settings.ray_address)
    return LocalEngine(settings.workers or os.cpu_count() or 1, limits, scratch)
