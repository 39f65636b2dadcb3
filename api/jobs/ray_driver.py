"""The process at the other end of `RayProcess`: `python -m shardwright.api.jobs.ray_driver`."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

from shardwright.api.jobs.engine import Failed, JobFailure, Report
from shardwright.api.jobs.ray_engine import RayEngine
from shardwright.api.jobs.ray_process import News
from shardwright.api.jobs.worker import end_with
from shardwright.errors import ShardwrightError

_POLL_SECONDS = 0.5
_NO_SLOT = JobFailure(
    "lost", "the slot for the job was lost before it began", "job", "Submit it again"
)


def main() -> None:
    """Carries out commands until the other end is closed; arguments are FD and PARENT."""
    descriptor, parent = map(int, sys.argv[1:3])
    end_with(parent)
    connection = Connection(descriptor)
    engine = RayEngine(*connection.recv())
    try:
        engine.start()
    except ShardwrightError as error:
        connection.send(News(0, 0, str(error)))
        return
    commands: queue.SimpleQueue[tuple[int, str, Any] | None] = queue.SimpleQueue()
    reader = threading.Thread(target=_read, args=(connection, commands, engine), daemon=True)
    reader.start()
    heard, told = 0, None
    refused: list[Report] = []
    while True:
        while not commands.empty():
            command = commands.get()
            if command is None:
                engine.stop()
                return
            heard, name, argument = command
            if name == "cancel":
                engine.cancel(argument)
            elif engine.free():
                engine.submit(argument)
            else:
                refused.append(Failed(argument.id, _NO_SLOT))
        reports = [*refused, *engine.poll(0.0 if refused else _POLL_SECONDS)]
        refused.clear()
        news = News(heard, engine.free(), engine.trouble(), tuple(reports))
        if news != told:
            connection.send(news)
            told = news


def _read(
    connection: Connection,
    commands: queue.SimpleQueue[tuple[int, str, Any] | None],
    engine: RayEngine,
) -> None:
    """Takes commands in; None is the end of the server."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            commands.put(connection.recv())
            engine.wake()
    commands.put(None)
    engine.wake()


if __name__ == "__main__":
    main()
