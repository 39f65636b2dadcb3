"""The engine of a Ray cluster in a process of its own.

Ray ends every process whose cluster is gone for a minute. That must not be the server, which goes
on answering, and goes on with its jobs once there is a cluster again.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from shardwright.api.jobs.engine import Failed, JobFailure, Limits, Progressed, Report, Task

_log = logging.getLogger(__name__)
_AGAIN_SECONDS = 5.0
_STOP_SECONDS = 10.0
_GONE = "the connection to the Ray cluster was lost"


@dataclass(frozen=True)
class News:
    """What the process tells.

    Attributes:
      heard: number of the last command that it has carried out.
      free: slots that were free after it.
    """

    heard: int
    free: int
    trouble: str
    reports: tuple[Report, ...] = ()


class RayProcess:
    """A `RayEngine` at the other end of a pipe, started again whenever it ends."""

    def __init__(self, workers: int | None, limits: Limits, address: str | None) -> None:
        self._arguments = (workers, limits, address)
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._tasks: set[str] = set()
        self._sent = 0
        self._news = News(0, 0, "")
        self._trouble = ""
        self._again_at = 0.0
        self._wakes, self._wake_sender = socket.socketpair()
        self._wakes.setblocking(False)
        self._wake_sender.setblocking(False)

    def start(self) -> None:
        """Starts the process, which connects to the cluster."""
        self._connection, theirs = multiprocessing.Pipe(duplex=True)
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "shardwright.api.jobs.ray_driver",
                    str(theirs.fileno()),
                    str(os.getpid()),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._sent, self._news = 0, News(0, 0, "")
        self._trouble = self._trouble or "the Ray cluster is being connected to"
        self._connection.send(self._arguments)

    def free(self) -> int:
        """Slots that were free when it last told; none while a command is on its way."""
        return self._news.free if self._news.heard == self._sent else 0

    def submit(self, task: Task) -> None:
        """Hands a task on."""
        self._tasks.add(task.id)
        self._send("submit", task)

    def cancel(self, task_id: str) -> None:
        """Hands a cancellation on."""
        self._tasks.discard(task_id)
        self._send("cancel", task_id)

    def poll(self, timeout_s: float) -> list[Report]:
        """Reads what the process tells."""
        if self._connection is None:
            if time.monotonic() >= self._again_at:
                self.start()
            else:
                timeout_s = min(timeout_s, _AGAIN_SECONDS)
        sources: list[Any] = [self._wakes]
        if self._connection is not None:
            sources.append(self._connection)
        found = multiprocessing.connection.wait(sources, timeout_s)
        if self._wakes in found:
            with contextlib.suppress(OSError):
                self._wakes.recv(4096)
        if self._connection is None or self._connection not in found:
            return []
        try:
            self._news = self._connection.recv()
        except (EOFError, OSError):
            return self._ended()
        self._trouble = self._news.trouble
        for report in self._news.reports:
            if not isinstance(report, Progressed):
                self._tasks.discard(report.task_id)
        return list(self._news.reports)

    def wake(self) -> None:
        """Ends a `poll` early."""
        with contextlib.suppress(OSError):
            self._wake_sender.send(b"\0")

    def stop(self) -> None:
        """Ends the process, and its slots with it."""
        if self._process is not None:
            if self._connection is not None:
                self._connection.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_SECONDS)
            self._kill()
        self._wakes.close()
        self._wake_sender.close()

    def trouble(self) -> str:
        """Why no slot can be had."""
        return self._trouble

    def _send(self, command: str, argument: Any) -> None:
        self._sent += 1
        if self._connection is not None:
            # One that has ended shows so when it is read from.
            with contextlib.suppress(OSError):
                self._connection.send((self._sent, command, argument))

    def _ended(self) -> list[Report]:
        """Gives up every task of a process that has ended."""
        assert self._connection is not None
        self._connection.close()
        self._connection = None
        self._kill()
        self._trouble = self._trouble or _GONE
        self._again_at = time.monotonic() + _AGAIN_SECONDS
        self._sent, self._news = 0, News(0, 0, "")
        _log.error("the connection to Ray has ended (%s) and is made again", self._trouble)
        failure = JobFailure("lost", _GONE, "job", "Submit it again once the cluster is back")
        lost: list[Report] = [Failed(task_id, failure) for task_id in sorted(self._tasks)]
        self._tasks.clear()
        return lost

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
