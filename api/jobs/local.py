"""Jobs in processes of this machine, started beforehand and reused."""

from __future__ import annotations

import contextlib
import itertools
import logging
import multiprocessing.connection
import os
import socket
import time
from pathlib import Path
from typing import Any, get_args

from shardwright.api.jobs.engine import (
    Failed,
    FailureKind,
    JobFailure,
    Limits,
    Progressed,
    Report,
    Succeeded,
    Task,
)
from shardwright.api.jobs.worker_process import WorkerProcess, receive

_log = logging.getLogger(__name__)
_WATCH_SECONDS = 0.1
"""How often memory and time of busy workers are looked at: a fast one allocates 0.3 GB in it."""
_START_SECONDS = 120.0
"""A worker that is not ready by then is killed; imports take 3 to 5 seconds."""
_MOST_FAILED_STARTS = 5
_PAUSE_SECONDS = 5.0
_LONGEST_TEXT = 500
_LONGEST_FAULT = 4000


class LocalEngine:
    """Worker processes: one task each at a time, killed where it must be and replaced.

    Attributes:
      scratch: the folder of the workers' logs, in which they run.
    """

    def __init__(self, workers: int, limits: Limits, scratch: Path) -> None:
        self._count = workers
        self._limits = limits
        self.scratch = scratch
        self._started = False
        self._numbers = itertools.count(1)
        self._workers: list[WorkerProcess] = []
        self._failed_starts = 0
        self._paused_until = 0.0
        self._trouble = ""
        self._watched_at = 0.0
        self._wakes, self._wake_sender = socket.socketpair()
        self._wakes.setblocking(False)
        self._wake_sender.setblocking(False)

    def start(self) -> None:
        """Begins to start workers."""
        self._started = True
        self._fill()

    def free(self) -> int:
        """Workers that are ready and have no task."""
        return sum(worker.ready and worker.task is None for worker in self._workers)

    def submit(self, task: Task) -> None:
        """Gives a task to an idle worker."""
        next(w for w in self._workers if w.ready and w.task is None).begin(task)

    def cancel(self, task_id: str) -> None:
        """Kills the worker of a task."""
        for worker in self._workers:
            if worker.task is not None and worker.task.id == task_id:
                self._drop(worker)
                break
        self._fill()

    def wake(self) -> None:
        """Ends a `poll` early."""
        # A full buffer means that it is awake already.
        with contextlib.suppress(OSError):
            self._wake_sender.send(b"\0")

    def poll(self, timeout_s: float) -> list[Report]:
        """Reads what workers tell, and watches what they use."""
        deadline = time.monotonic() + timeout_s
        while True:
            woken, reports = self._wait(deadline)
            reports += self._watch()
            self._fill()
            if reports or woken or time.monotonic() >= deadline:
                return reports

    def stop(self) -> None:
        """Kills every worker."""
        for worker in list(self._workers):
            self._drop(worker)
        self._started = False
        self._wakes.close()
        self._wake_sender.close()

    def trouble(self) -> str:
        """Why workers do not start."""
        return self._trouble

    @property
    def pids(self) -> list[int]:
        """The processes of the workers."""
        return [worker.pid for worker in self._workers]

    def _wait(self, deadline: float) -> tuple[bool, list[Report]]:
        by_connection = {worker.connection: worker for worker in self._workers}
        timeout = max(0.0, deadline - time.monotonic())
        if any(worker.task is not None or not worker.ready for worker in self._workers):
            timeout = min(timeout, _WATCH_SECONDS)
        found = multiprocessing.connection.wait([*by_connection, self._wakes], timeout)
        woken = self._wakes in found
        if woken:
            with contextlib.suppress(OSError):
                self._wakes.recv(4096)
        reports: list[Report] = []
        for connection in found:
            if connection in by_connection:
                reports += self._read(by_connection[connection])
        return woken, reports

    def _read(self, worker: WorkerProcess) -> list[Report]:
        message = receive(worker.connection)
        if message is None:
            return self._died(worker)
        if message.get("ready"):
            worker.ready = True
            self._failed_starts, self._trouble = 0, ""
            return []
        task = worker.task
        if task is None:
            return self._died(worker)
        if "progress" in message:
            progress = _progress(message["progress"])
            worker.stage = str(progress.get("stage", ""))
            return [Progressed(task.id, progress)]
        worker.task = None
        report = outcome(task, message)
        if isinstance(report, Failed) and report.failure.kind == "internal":
            # The traceback is for whoever runs the service, and not for whoever asked.
            _log.error("a job failed: %s\n%s", report.failure.what, worker.log_tail())
        if worker.has_grown():
            _log.info("worker %d has grown and is replaced", worker.pid)
            self._drop(worker)
        return [report]

    def _watch(self) -> list[Report]:
        """Ends what uses more than it may."""
        now = time.monotonic()
        if now - self._watched_at < _WATCH_SECONDS:
            return []
        self._watched_at = now
        reports: list[Report] = []
        for worker in list(self._workers):
            if not worker.is_alive:
                # What it said last comes first.
                while worker in self._workers and worker.connection.poll():
                    reports += self._read(worker)
                if worker in self._workers:
                    reports += self._died(worker)
            elif worker.task is not None:
                failure = worker.exceeded()
                if failure is not None:
                    reports.append(Failed(worker.task.id, failure))
                    self._drop(worker)
            elif not worker.ready and now - worker.began > _START_SECONDS:
                reports += self._died(worker)
        return reports

    def _died(self, worker: WorkerProcess) -> list[Report]:
        self._drop(worker)
        if worker.task is not None:
            failure = worker.death()
            _log.warning("a worker died: %s\n%s", failure.what, worker.log_tail())
            return [Failed(worker.task.id, failure)]
        if not worker.ready:
            self._failed_starts += 1
            self._trouble = (worker.log_tail().strip().splitlines() or ["it wrote nothing"])[-1]
            _log.error("a worker does not start: %s", worker.log_tail())
            if self._failed_starts >= _MOST_FAILED_STARTS:
                self._paused_until = time.monotonic() + _PAUSE_SECONDS
        return []

    def _drop(self, worker: WorkerProcess) -> None:
        worker.kill()
        self._workers.remove(worker)

    def _fill(self) -> None:
        """Starts workers until there are as many as there should be."""
        if not self._started or time.monotonic() < self._paused_until:
            return
        while len(self._workers) < self._count:
            try:
                worker = WorkerProcess(self.scratch, next(self._numbers), self._limits)
            except OSError as error:  # no processes, files or memory left
                self._trouble = f"a worker does not start: {error}"
                self._paused_until = time.monotonic() + _PAUSE_SECONDS
                return
            self._workers.append(worker)


_PROGRESS_TYPES: dict[str, type | tuple[type, ...]] = {
    "stage": str,
    "meshes_tried": int,
    "meshes": int,
    "best_step_s": (int, float),
    "message": str,
    "gap": (int, float),
}


def _progress(told: Any) -> dict[str, Any]:
    """Progress as a worker tells it, with nothing else in it."""
    if not isinstance(told, dict):
        return {}
    return {
        name: told[name][:_LONGEST_TEXT] if isinstance(told[name], str) else told[name]
        for name, type_ in _PROGRESS_TYPES.items()
        if isinstance(told.get(name), type_)
    }


def outcome(task: Task, message: dict[str, Any]) -> Report:
    """The end of a task as its worker tells it, checked."""
    try:
        if "done" in message:
            done = message["done"]
            files = tuple(map(str, done["files"]))
            if any(
                os.path.basename(name) != name or not (task.out / name).is_file() for name in files
            ):
                raise ValueError("a file of the result is not there")
            seconds = {str(k): float(v) for k, v in done["stage_seconds"].items()}
            return Succeeded(task.id, dict(done["summary"]), files, seconds)
        told = message["failed"]
        if told["kind"] not in get_args(FailureKind):
            raise ValueError("an unknown kind of failure")
        what, where, do = (str(told[name])[:_LONGEST_FAULT] for name in ("what", "where", "do"))
        sizes = (told.get(name) for name in ("least_bytes", "limit_bytes"))
        least, limit = (float(size) if isinstance(size, int | float) else None for size in sizes)
        return Failed(task.id, JobFailure(told["kind"], what, where, do, least, limit))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"the worker's answer is not one ({error})"
        return Failed(task.id, JobFailure("internal", what, "job", "Submit it again"))
