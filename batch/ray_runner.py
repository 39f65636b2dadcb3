"""Sweeps on Ray."""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from typing import Any

from shardwright.batch.sweep import Outcome, Runner, Work, outcome_of
from shardwright.errors import InputError
from shardwright.planner.workers import Failure

_AHEAD = 2
"""Tasks in flight for each core: enough that none waits, few enough to give up quickly."""


def ray_runner(address: str | None = None) -> Runner:
    """Runs work on a Ray cluster, one core a point.

    Args:
      address: of the cluster; a local one is started where None. Its nodes need Shardwright, and
        the modules of targets that are functions.

    Raises:
      InputError: Ray is not installed, or there is no cluster at the address.
    """
    try:
        import ray
    except ImportError:
        raise InputError(
            "Ray is not installed", where="--ray", do="pip install 'shardwright[ray]'"
        ) from None

    def run(work: Sequence[Work]) -> Generator[tuple[int, Outcome]]:
        started = not ray.is_initialized()
        if started:
            _connect(ray, address)
        try:
            yield from _run(ray, work)
        finally:
            if started:
                ray.shutdown()

    return run


def _connect(ray: Any, address: str | None) -> None:
    try:
        ray.init(
            address=address or "local",
            logging_level="ERROR",
            log_to_driver=False,
            include_dashboard=False if address is None else None,
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise InputError(
            f"there is no Ray cluster here ({reason})", where=str(address), do="Check the address"
        ) from None


def _run(ray: Any, work: Sequence[Work]) -> Generator[tuple[int, Outcome]]:
    remote = ray.remote(num_cpus=1, max_retries=0)(outcome_of)
    cores = int(ray.cluster_resources().get("CPU", os.cpu_count() or 1))
    pending = iter(enumerate(work))
    running: dict[Any, int] = {}

    def start() -> None:
        for position, one in pending:
            running[remote.remote(one)] = position
            if len(running) >= _AHEAD * cores:
                return

    start()
    try:
        while running:
            finished, _ = ray.wait(list(running), num_returns=1)
            for reference in finished:
                position = running.pop(reference)
                yield position, _result(ray, reference)
            start()
    finally:
        for reference in running:
            ray.cancel(reference, force=True)


def _result(ray: Any, reference: Any) -> Outcome:
    try:
        outcome: Outcome = ray.get(reference)
    except ray.exceptions.RayError as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        return Failure("crashed", f"the worker of Ray died ({reason})", do="Run the sweep again")
    return outcome
