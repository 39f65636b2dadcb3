"""A place for one job on a machine of a Ray cluster.

Inside it is the engine of local processes with one worker, so that a job has the same limits
and fails in the same ways wherever it runs, and what reads uploads is never Ray's own process.
"""

from __future__ import annotations

import os
import queue
import shutil
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardwright.api.jobs.engine import Limits, Report, Task
from shardwright.api.jobs.local import LocalEngine
from shardwright.api.jobs.scratch import open_scratch
from shardwright.version import VERSION

_POLL_SECONDS = 1.0


class Slot:
    """The actor. All its methods may be called at once; one thread owns the engine."""

    def __init__(self, version: str, limits: Limits) -> None:
        if version != VERSION:
            raise RuntimeError(
                f"the server has Shardwright {version} and this machine has {VERSION}"
            )
        # Slots are killed without a warning: the next one cleans up after them.
        parent = Path(tempfile.gettempdir()) / f"shardwright-{os.getuid()}"
        parent.mkdir(mode=0o700, exist_ok=True)
        if parent.stat().st_uid != os.getuid():
            raise RuntimeError(f"{parent} belongs to another user of this machine")
        self._folder = open_scratch(parent)
        self._engine = LocalEngine(1, limits, self._folder)
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self._free = threading.Event()
        threading.Thread(target=self._run, name="engine", daemon=True).start()

    def put(self, task_id: str, chunk: bytes) -> None:
        """Adds a piece to the program of a task that will begin."""
        with (self._home(task_id) / "program").open("ab") as file:
            file.write(chunk)

    def begin(self, task_id: str, kind: str, request: Mapping[str, Any], has_program: bool) -> None:
        """Starts a task; only while `poll` says that the slot is free."""
        home = self._home(task_id)
        task = Task(task_id, kind, request, home / "program" if has_program else None, home / "out")
        task.out.mkdir()

        def submit() -> None:
            self._free.clear()
            self._engine.submit(task)

        self._do(submit)

    def cancel(self, task_id: str) -> None:
        """Kills the worker of a task."""
        self._do(lambda: self._engine.cancel(task_id))

    def poll(self, timeout_s: float) -> tuple[bool, str, list[Report]]:
        """Waits for reports.

        Returns:
          Whether a task would start at once, what is wrong with the worker, and the reports.
        """
        reports: list[Report] = []
        try:
            reports.append(self._reports.get(timeout=timeout_s))
            while True:
                reports.append(self._reports.get_nowait())
        except queue.Empty:
            return self._free.is_set(), self._engine.trouble(), reports

    def read(self, task_id: str, name: str, offset: int, size: int) -> bytes:
        """A piece of a file of a task's result; empty at the end."""
        with (self._home(task_id) / "out" / name).open("rb") as file:
            file.seek(offset)
            return file.read(size)

    def forget(self, task_id: str) -> None:
        """Deletes the files of a task."""
        shutil.rmtree(self._home(task_id), ignore_errors=True)

    def _home(self, task_id: str) -> Path:
        home = self._folder / task_id
        home.mkdir(exist_ok=True)
        return home

    def _do(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        self._engine.wake()

    def _run(self) -> None:
        try:
            self._engine.start()
            while True:
                while not self._commands.empty():
                    self._commands.get()()
                for report in self._engine.poll(_POLL_SECONDS):
                    self._reports.put(report)
                if self._engine.free():
                    self._free.set()
                else:
                    self._free.clear()
        except BaseException:
            # Without its engine the slot is of no use: as a dead actor it is replaced.
            traceback.print_exc()
            os._exit(1)
