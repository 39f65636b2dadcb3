"""The dispatcher that settings ask for."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from shardwright.api.jobs.dispatcher import Dispatcher, Observation
from shardwright.api.jobs.engine import Engine, Limits
from shardwright.api.jobs.local import LocalEngine
from shardwright.api.jobs.ray_process import RayProcess
from shardwright.api.jobs.scratch import open_scratch
from shardwright.api.settings import Settings
from shardwright.api.store.store import Store
from shardwright.errors import InputError


def make_dispatcher(
    store: Store, observe: Callable[[Observation], None] = lambda observation: None
) -> Dispatcher:
    """A dispatcher of a store's jobs, not started yet.

    Args:
      observe: called from the dispatcher's thread with what becomes of jobs here.

    Raises:
      InputError: the engine that is asked for is not installed.

    """
    scratch = open_scratch(store.settings.data_dir / "scratch")
    return Dispatcher(store, make_engine(store.settings, scratch), scratch, observe)


def make_engine(settings: Settings, scratch: Path) -> Engine:
    """The engine that settings ask for.

    Raises:
      InputError: it is not installed.
    """
    limits = Limits(settings.job_memory_bytes, settings.job_seconds)
    if settings.engine == "ray":
        if find_spec("ray") is None:
            raise InputError(
                "Ray is not installed",
                where="SHARDWRIGHT_ENGINE",
                do="Install shardwright[server,ray], or set it to local",
            )
        return RayProcess(settings.workers, limits, settings.ray_address)
    return LocalEngine(settings.workers or os.cpu_count() or 1, limits, scratch)
