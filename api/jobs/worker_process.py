"""One worker process as its engine sees it."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from shardwright.api.jobs import channel
from shardwright.api.jobs.engine import JobFailure, Limits, Task

_LOG_TAIL = 2000
_FAMILY_SECONDS = 1.0
"""How often it is looked for what a worker has started: that reads of every process there is."""
_GROWTH = 1 << 30
_READING = "read"
_READ_SECONDS = 300.0
"""A program of the largest size is read in one minute; a damaged one may take for ever."""
_RAISE_MEMORY = "Make the program smaller, or have the operator raise SHARDWRIGHT_JOB_MEMORY_BYTES"
_NO_MEMORY = ("bad_alloc", "out of memory", "Out of memory", "MemoryError", "Cannot allocate")


class WorkerProcess:
    """A worker: starting, idle, or at a task.

    Attributes:
      connection: the channel to it.
      ready: it has imported everything and takes tasks.
      task: what it works at.
    """

    def __init__(self, scratch: Path, number: int, limits: Limits) -> None:
        self.ready = False
        self.task: Task | None = None
        self.stage = ""
        self.began = time.monotonic()
        self._limits = limits
        self._idle_rss = 0
        self._last_words: str | None = None
        self._family: list[psutil.Process] = []
        self._family_at = -math.inf
        self._log_path = scratch / f"worker-{number}.log"
        self.connection, theirs = multiprocessing.Pipe(duplex=True)
        with theirs, self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "shardwright.api.jobs.worker",
                    str(theirs.fileno()),
                    str(os.getpid()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(),),
                cwd=scratch,
                env=_environment(),
                # A group of its own: it is killed with all that it started, and Ctrl-C in the
                # server's terminal is the server's matter.
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """It has not ended."""
        if sys.platform == "linux":
            # It stays a zombie until `kill`, so that nobody else gets its number before that.
            flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
            return os.waitid(os.P_PID, self.pid, flags) is None
        else:
            return self._process.poll() is None

    def begin(self, task: Task) -> None:
        """Gives it a task; a worker that has just died shows so when it is read from."""
        self.task, self.stage, self.began = task, "", time.monotonic()
        self._idle_rss = self._idle_rss or self._rss()
        os.truncate(self._log_path, 0)
        with contextlib.suppress(OSError):
            channel.send(
                self.connection,
                {
                    "kind": task.kind,
                    "request": dict(task.request),
                    "program": None if task.program is None else str(task.program),
                    "out": str(task.out),
                },
            )

    def exceeded(self) -> JobFailure | None:
        """What its task has used more of than it may."""
        took = time.monotonic() - self.began
        if took > self._limits.seconds:
            return JobFailure(
                "time-limit",
                f"the job ran for more than {self._limits.seconds:g} seconds{self._doing}",
                "job",
                "Give a smaller time_limit_s or a smaller program, or have the operator raise "
                "SHARDWRIGHT_JOB_SECONDS",
            )
        if self.stage in ("", _READING) and took > _READ_SECONDS:
            return JobFailure(
                "time-limit",
                f"the program was not read, or the model not traced, in {_READ_SECONDS:g} seconds",
                "job",
                "Plan a smaller one: fewer layers, or equal layers in a scan. No setting of the "
                "service raises this limit",
            )
        if self._rss() > self._limits.memory_bytes:
            return JobFailure(
                "out-of-memory",
                f"the job took more than {self._limits.memory_bytes / 2**30:.3g} GiB of memory"
                f"{self._doing}",
                "job",
                _RAISE_MEMORY,
            )
        return None

    def death(self) -> JobFailure:
        """Why it died at its task, to be asked after `kill`."""
        code = self._process.returncode
        log = self.log_tail()
        if any(sign in log for sign in _NO_MEMORY) or code == -signal.SIGKILL:
            return JobFailure(
                "out-of-memory",
                f"the system had no memory left for the job{self._doing}",
                "job",
                _RAISE_MEMORY,
            )
        how = f"with exit code {code}"
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                how = f"by {signal.Signals(-code).name}"
        return JobFailure(
            "crashed",
            f"the process that ran the job ended {how}{self._doing}",
            "job",
            "The program may be damaged or nested too deeply: lower or export it again",
        )

    def has_grown(self) -> bool:
        """It holds so much more memory than at first that a new one is better."""
        return self._rss() > self._idle_rss + min(_GROWTH, self._limits.memory_bytes // 4)

    def kill(self) -> None:
        """Ends it, whatever it does, with everything that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self.connection.close()
        self._last_words = self.log_tail()
        self._log_path.unlink(missing_ok=True)

    def log_tail(self) -> str:
        """The end of what it wrote to stdout and stderr since its task began."""
        if self._last_words is not None:
            return self._last_words
        with contextlib.suppress(OSError), self._log_path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_TAIL))
            return log.read().decode("utf-8", "replace")
        return ""

    @property
    def _doing(self) -> str:
        return f" while it was at the stage {self.stage!r}" if self.stage else ""

    def _rss(self) -> int:
        """Resident bytes of the worker and all that it started."""
        now = time.monotonic()
        if now - self._family_at > _FAMILY_SECONDS:
            self._family_at = now
            with contextlib.suppress(psutil.Error):
                worker = psutil.Process(self.pid)
                self._family = [worker, *worker.children(recursive=True)]
        total = 0
        for process in self._family:
            with contextlib.suppress(psutil.Error):
                total += process.memory_info().rss
        return total


def receive(connection: Connection) -> dict[str, Any] | None:
    """The next message of a worker; None where it is dead or speaks nonsense."""
    try:
        return channel.receive(connection)
    except (EOFError, OSError, ValueError):
        return None


def _environment() -> dict[str, str]:
    """Without the server's secrets: a worker reads what strangers uploaded."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("SHARDWRIGHT_")}
    return kept | {
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONUNBUFFERED": "1",
    }
