"""Jobs on the machines of a Ray cluster."""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass
from typing import Any

from shardwright.api.jobs.engine import Failed, JobFailure, Limits, Report, Succeeded, Task
from shardwright.api.jobs.ray_slot import Slot
from shardwright.errors import InputError
from shardwright.version import VERSION

_log = logging.getLogger(__name__)
_CHUNK = 8 << 20
_BUSY_SECONDS = 0.5
"""How long one question for reports of a busy slot waits on the other side."""
_IDLE_SECONDS = 5.0
_WAIT_SECONDS = 0.05
_CALL_SECONDS = 60.0
_NO_ROOM_SECONDS = 60.0


@dataclass
class _RemoteSlot:
    actor: Any
    began: float
    answer: Any = None
    free: bool = False
    heard: bool = False
    task: Task | None = None


class RayEngine:
    """Slots on a cluster: actors of one CPU and the memory of one job each.

    A slot that is lost, with its machine perhaps, is replaced wherever there is room. The files of
    jobs go through the actors in pieces, so that machines need to share nothing.
    """

    def __init__(self, workers: int | None, limits: Limits, address: str | None) -> None:
        self._wanted = workers
        self._limits = limits
        self._address = address
        self._slots: list[_RemoteSlot] = []
        self._made: list[Report] = []
        self._woken = threading.Event()
        self._trouble = ""
        self._ray: Any = None

    def start(self) -> None:
        """Connects to the cluster and asks for slots.

        Raises:
          InputError: the cluster is not there.
        """
        import ray

        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            ray.init(
                address=self._address,
                namespace="shardwright",
                ignore_reinit_error=True,
                log_to_driver=False,
                configure_logging=False,
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise InputError(
                f"the Ray cluster cannot be reached ({str(error).splitlines()[0]})",
                where=f"SHARDWRIGHT_RAY_ADDRESS {self._address or ''}".strip(),
                do="Start it (`ray start --head`), or correct the address",
            ) from None
        self._ray = ray
        if self._wanted is None:
            self._wanted = max(1, int(ray.cluster_resources().get("CPU", 1)))
        self._fill()

    def free(self) -> int:
        """Slots that are ready and have no task."""
        return sum(slot.free and slot.task is None for slot in self._slots)

    def submit(self, task: Task) -> None:
        """Sends a task and its program to a free slot."""
        slot = next(s for s in self._slots if s.free and s.task is None)
        slot.task, slot.free = task, False
        try:
            if task.program is not None:
                with task.program.open("rb") as file:
                    while chunk := file.read(_CHUNK):
                        self._call(slot.actor.put.remote(task.id, chunk))
            request = dict(task.request)
            self._call(slot.actor.begin.remote(task.id, task.kind, request, bool(task.program)))
        except self._ray.exceptions.RayError as error:
            self._made += self._lost(slot, error)

    def cancel(self, task_id: str) -> None:
        """Has a slot kill the worker of its task."""
        for slot in self._slots:
            if slot.task is not None and slot.task.id == task_id:
                slot.actor.cancel.remote(task_id)
                slot.actor.forget.remote(task_id)
                slot.task = None

    def wake(self) -> None:
        """Ends a `poll` early."""
        self._woken.set()

    def poll(self, timeout_s: float) -> list[Report]:
        """Asks every slot what there is to report."""
        deadline = time.monotonic() + timeout_s
        while True:
            reports, self._made = self._made, []
            for slot in list(self._slots):
                if slot.answer is None:
                    wait = (
                        _BUSY_SECONDS if slot.task is not None or not slot.free else _IDLE_SECONDS
                    )
                    slot.answer = slot.actor.poll.remote(wait)
            by_answer = {slot.answer: slot for slot in self._slots}
            answered, _ = self._ray.wait(
                list(by_answer), num_returns=len(by_answer), timeout=_WAIT_SECONDS
            )
            for answer in answered:
                reports += self._read(by_answer[answer], answer)
            if self._woken.is_set() or reports or time.monotonic() >= deadline:
                self._woken.clear()
                return reports

    def stop(self) -> None:
        """Kills every slot, and their workers with them."""
        if self._ray is None:
            return
        # Slots end with the connection, which may be lost already.
        self._slots.clear()
        self._ray.shutdown()

    def trouble(self) -> str:
        """Why no slot can be had."""
        waited = [time.monotonic() - slot.began for slot in self._slots if not slot.heard]
        if len(waited) == len(self._slots) and max(waited, default=0.0) > _NO_ROOM_SECONDS:
            gib = self._limits.memory_bytes / 2**30
            return f"no machine of the Ray cluster has one CPU and {gib:.3g} GiB free"
        return self._trouble

    def _read(self, slot: _RemoteSlot, answer: Any) -> list[Report]:
        slot.answer = None
        try:
            free, self._trouble, reports = self._ray.get(answer)
            slot.free, slot.heard = free, True
            found = [self._settled(slot, report) for report in reports]
        except self._ray.exceptions.RayError as error:
            return self._lost(slot, error)
        return [report for report in found if report is not None]

    def _settled(self, slot: _RemoteSlot, report: Report) -> Report | None:
        """A report with its files fetched; None of a task that was cancelled."""
        task = slot.task
        if task is None or report.task_id != task.id:
            return None
        if isinstance(report, Succeeded):
            for name in report.files:
                self._fetch(slot, task, name)
        if isinstance(report, Succeeded | Failed):
            slot.actor.forget.remote(task.id)
            slot.task = None
        return report

    def _fetch(self, slot: _RemoteSlot, task: Task, name: str) -> None:
        with (task.out / name).open("wb") as file:
            while chunk := self._call(slot.actor.read.remote(task.id, name, file.tell(), _CHUNK)):
                file.write(chunk)

    def _call(self, answer: Any) -> Any:
        return self._ray.get(answer, timeout=_CALL_SECONDS)

    def _lost(self, slot: _RemoteSlot, error: Exception) -> list[Report]:
        """Gives a slot up and asks for another."""
        lines = str(error).strip().splitlines() or [type(error).__name__]
        _log.warning("a slot of the Ray cluster is lost: %s", lines[0])
        self._trouble = lines[-1]
        self._ray.kill(slot.actor)
        self._slots.remove(slot)
        self._fill()
        if slot.task is None:
            return []
        what = f"the machine that ran the job, or its Ray process, is gone ({lines[0][:200]})"
        return [Failed(slot.task.id, JobFailure("lost", what, "job", "Submit it again"))]

    def _fill(self) -> None:
        """Asks for slots until there are as many as there should be."""
        remote = self._ray.remote(
            num_cpus=1,
            memory=self._limits.memory_bytes,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=4,
        )(Slot)
        while len(self._slots) < (self._wanted or 1):
            actor = remote.remote(VERSION, self._limits)
            self._slots.append(_RemoteSlot(actor, time.monotonic()))
