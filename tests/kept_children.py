"""Children of `run_tasks` that have done their tasks are kept for the tests that come after.

Starting one takes seconds, and planning leaves nothing behind in it. Tests of the children
themselves, whose tasks are their own, get new ones that end, and so does every process of a
command that a test starts.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shardwright.batch.sweep import Work
from shardwright.models import model_names
from shardwright.planner import workers
from shardwright.planner.workers import Task

_KEPT = 2

Environment = frozenset[tuple[str, str]]

_idle: list[tuple[Environment, subprocess.Popen[bytes]]] = []


def _loads_nothing(task: Task) -> bool:
    """The task loads no module of a user's, which may be another one in another test."""
    if isinstance(task.payload, Work):
        return task.payload.point.target in model_names()
    return task.function.startswith("shardwright.planner.")


def _environment() -> Environment:
    return frozenset((k, v) for k, v in os.environ.items() if not k.startswith("PYTEST_"))


def _taken() -> subprocess.Popen[bytes] | None:
    """An idle child that was started in this environment."""
    here = _environment()
    for place, (environment, process) in enumerate(_idle):
        if environment == here:
            del _idle[place]
            return process
    return None


def _keep(environment: Environment, process: subprocess.Popen[bytes]) -> None:
    _idle.append((environment, process))
    while len(_idle) > _KEPT:
        workers._end(_idle.pop(0)[1])


class _KeptChild(workers._Child):
    """A child that is kept when it is stopped between two tasks of planning."""

    def __init__(self) -> None:
        super().__init__()
        self._may_be_kept = True
        self._environment = _environment()

    def run(self, task: Task, report: Callable[[Any], None]) -> Any:
        before, self._may_be_kept = self._may_be_kept, False
        result = super().run(task, report)
        self._may_be_kept = before and _loads_nothing(task)
        return result

    def _running(self) -> subprocess.Popen[bytes] | None:
        with self._lock:
            if self._process is None and not self._stopped:
                self._process = _taken()
        return super()._running()

    def stop(self) -> None:
        with self._lock:
            process = self._process
            if process is not None and process.poll() is None and self._may_be_kept:
                self._process = None
                _keep(self._environment, process)
        super().stop()


@pytest.fixture(scope="session", autouse=True)
def kept_children() -> Iterator[None]:
    """Keeps them until the last test has run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "_Child", _KeptChild)
        yield
    for _, process in _idle:
        workers._end(process)
    _idle.clear()
