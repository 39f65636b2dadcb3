"""Work in child interpreters, several at a time.

Each child is `python -m shardwright.planner.worker`, which keeps what it has imported and
compiled from one task to the next. Children are plain processes that speak over pipes, so that
scripts need no `if __name__ == "__main__"`, a child that dies takes only its own task with it, and
every child ends with its parent.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import queue
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import IO, Any

from shardwright.errors import DoesNotFitError, InputError, ShardwrightError

_HEADER = struct.Struct("!Q")


@dataclass(frozen=True)
class Failure:
    """Why a task has no result.

    Attributes:
      kind: "input", "does-not-fit", "crashed" (the process died) or "internal" (a fault of
        Shardwright itself).
      what, where, do: as of a `ShardwrightError`.
      least_bytes, limit_bytes: as of a `DoesNotFitError`.
    """

    kind: str
    what: str
    where: str = ""
    do: str = ""
    least_bytes: float | None = None
    limit_bytes: float | None = None

    @property
    def message(self) -> str:
        """One line that says it all."""
        return str(self.error())

    def error(self) -> ShardwrightError:
        """The same as an exception."""
        if self.kind == "does-not-fit":
            return DoesNotFitError(
                self.what,
                where=self.where,
                do=self.do,
                least_bytes=self.least_bytes,
                limit_bytes=self.limit_bytes,
            )
        kind = InputError if self.kind == "input" else ShardwrightError
        return kind(self.what, where=self.where, do=self.do)


def failure_of(error: BaseException) -> Failure:
    """An exception as a failure."""
    if isinstance(error, DoesNotFitError):
        return Failure(
            "does-not-fit", error.what, error.where, error.do, error.least_bytes, error.limit_bytes
        )
    if isinstance(error, ShardwrightError):
        return Failure("input", error.what, error.where, error.do)
    return Failure("internal", f"{type(error).__name__}: {error}")


@dataclass(frozen=True)
class Task:
    """A call to make in a child: `function` is "module:name" and takes `payload` and a report."""

    function: str
    payload: Any


def available_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def write_message(stream: IO[bytes], message: Any) -> None:
    """Writes one pickled message."""
    data = pickle.dumps(message)
    stream.write(_HEADER.pack(len(data)) + data)
    stream.flush()


def read_message(stream: IO[bytes]) -> Any:
    """Reads one pickled message.

    Raises:
      EOFError: the other side has gone.
    """
    header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size:
        raise EOFError
    (size,) = _HEADER.unpack(header)
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return pickle.loads(data)


def run_tasks(
    tasks: Sequence[Task],
    *,
    workers: int | None = None,
    on_progress: Callable[[int, Any], None] | None = None,
) -> Generator[tuple[int, Any]]:
    """Runs tasks in children and yields their results as they finish.

    Closing the generator ends the children at once.

    Args:
      tasks: to run, in this order as far as workers are free.
      workers: how many at a time; as many as there are cores where None.
      on_progress: called with a task's position and what it reported; None when it starts.

    Yields:
      a task's position, and its result or a `Failure`.
    """
    count = max(1, min(len(tasks), workers or available_cores()))
    pending = iter(range(len(tasks)))
    lock = threading.Lock()
    events: queue.SimpleQueue[tuple[str, int, Any]] = queue.SimpleQueue()
    children = [_Child() for _ in range(count)]

    def next_task() -> int | None:
        with lock:
            return next(pending, None)

    def serve(child: _Child) -> None:
        while (position := next_task()) is not None:
            events.put(("progress", position, None))
            told = functools.partial(_put, events, "progress", position)
            try:
                result = child.run(tasks[position], told)
            except Exception as error:  # such as a payload that cannot be pickled
                result = failure_of(error)
            events.put(("result", position, result))

    threads = [threading.Thread(target=serve, args=(c,), daemon=True) for c in children]
    try:
        for thread in threads:
            thread.start()
        left = len(tasks)
        while left:
            kind, position, value = events.get()
            if kind == "result":
                left -= 1
                yield position, value
            elif on_progress is not None:
                on_progress(position, value)
    finally:
        with lock:
            for _ in pending:
                pass  # no more tasks for anybody
        for child in children:
            child.stop()
        for thread in threads:
            if thread.ident is not None:
                thread.join()


def _put(
    events: queue.SimpleQueue[tuple[str, int, Any]], kind: str, position: int, value: Any
) -> None:
    events.put((kind, position, value))


class _Child:
    """One child interpreter, started when first needed and again after it died."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False
        self._lock = threading.Lock()

    def run(self, task: Task, report: Callable[[Any], None]) -> Any:
        """The result of a task, or a `Failure`."""
        process = self._running()
        if process is None or process.stdin is None or process.stdout is None:
            return Failure("crashed", "the work was interrupted")
        try:
            write_message(process.stdin, task)
            while True:
                kind, value = read_message(process.stdout)
                if kind == "result":
                    return value
                report(value)
        except (OSError, EOFError, pickle.UnpicklingError):
            code = self._discard()
            return Failure(
                "crashed",
                f"the process that did this work died ({_death(code)})",
                do="Look for a lack of memory, or run this one alone",
            )

    def _running(self) -> subprocess.Popen[bytes] | None:
        with self._lock:
            if self._process is None and not self._stopped:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "shardwright.planner.worker"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env=os.environ | {"SHARDWRIGHT_WORKER_PARENT": str(os.getpid())},
                )
            return self._process

    def _discard(self) -> int | None:
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return None
        return _end(process)

    def stop(self) -> None:
        """Ends the child, whatever it does."""
        with self._lock:
            self._stopped = True
            process, self._process = self._process, None
        if process is not None:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> int:
    process.kill()
    code = process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    return code


def _death(code: int | None) -> str:
    if code is None:
        return "stopped"
    return f"signal {-code}" if code < 0 else f"exit code {code}"
