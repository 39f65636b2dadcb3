"""Server-sent events of jobs.

One task asks in one query a tick which of the watched jobs have new events, and hands these out. A
watcher costs a queue: neither a thread nor a connection to the database.

Source of the format: WHATWG HTML Living Standard, section "Server-sent events".
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable

from prometheus_client import Gauge
from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse

from shardwright.api.problems import problem
from shardwright.api.store import JobEvent, Store

_TICK_S = 0.25
_KEEP_ALIVE_S = 15.0
_AFTER_FAILURE_S = 2.0
_RETRY_MS = 2000
_MOST_STREAMS = 256

_log = logging.getLogger(__name__)


class _Watcher:
    def __init__(self, job_id: str, after: int) -> None:
        self.job_id = job_id
        self.after = after
        self.events: asyncio.Queue[JobEvent | None] = asyncio.Queue()


class EventHub:
    """Hands the events of jobs to those who watch them."""

    def __init__(self, store: Store, streams: Gauge) -> None:
        self._store = store
        self._streams = streams
        self._watchers: dict[str, set[_Watcher]] = defaultdict(set)
        self._by_caller: Counter[str] = Counter()
        self._came = asyncio.Event()
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to read events."""
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(self._run())

    def end_streams(self) -> None:
        """Ends every stream, so that a server that stops waits for none. Event loop only."""
        self._stopping = True
        for watchers in self._watchers.values():
            for watcher in watchers:
                watcher.events.put_nowait(None)

    def end_streams_soon(self) -> None:
        """The same, from any thread or handler of a signal."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.end_streams)

    async def stop(self) -> None:
        """Ends every stream and stops reading."""
        self.end_streams()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def check_room(self, caller: str) -> None:
        """Refuses a caller who would take up all the connections of the server.

        Raises:
          Problem: it follows as many jobs as it may.
        """
        if self._by_caller[caller] >= _MOST_STREAMS:
            raise problem(
                "rate-limited",
                f"{_MOST_STREAMS} streams of events are open",
                where="events",
                do="Close some of them",
                headers={"Retry-After": "5"},
            )

    async def watch(self, job_id: str, after: int, caller: str) -> AsyncIterator[JobEvent | None]:
        """The events of a job after one that is known, as they come.

        Args:
          caller: who watches.

        Yields:
          events, the last of them "done"; None where none came for some seconds.
        """
        if self._stopping:
            return
        watcher = _Watcher(job_id, after)
        self._watchers[job_id].add(watcher)
        self._by_caller[caller] += 1
        self._streams.inc()
        self._came.set()
        try:
            while True:
                try:
                    event = await asyncio.wait_for(watcher.events.get(), _KEEP_ALIVE_S)
                except TimeoutError:
                    yield None
                    continue
                if event is None:
                    return
                yield event
                if event.name == "done":
                    return
        finally:
            self._streams.dec()
            self._by_caller -= Counter([caller])
            self._watchers[job_id].discard(watcher)
            if not self._watchers[job_id]:
                del self._watchers[job_id]

    def _new_events(self, wanted: dict[str, int]) -> dict[str, list[JobEvent]]:
        newest = self._store.jobs.newest_events(wanted)
        return {
            job_id: self._store.jobs.events(job_id, after)
            for job_id, after in wanted.items()
            if newest.get(job_id, 0) > after
        }

    async def _run(self) -> None:
        while True:
            if not self._watchers:
                self._came.clear()
                await self._came.wait()
            wanted = {
                job_id: min(watcher.after for watcher in watchers)
                for job_id, watchers in self._watchers.items()
            }
            try:
                found = await run_in_threadpool(self._new_events, wanted)
            except Exception:
                _log.exception("events cannot be read; trying again")
                await asyncio.sleep(_AFTER_FAILURE_S)
                continue
            for job_id, events in found.items():
                for watcher in self._watchers.get(job_id, ()):
                    for event in events:
                        if event.seq > watcher.after:
                            watcher.after = event.seq
                            watcher.events.put_nowait(event)
            await asyncio.sleep(_TICK_S)


def stream(
    hub: EventHub,
    job_id: str,
    after: int,
    caller: str,
    final: Callable[[], str],
) -> StreamingResponse:
    """The events of a job as a response.

    Args:
      caller: who asked.
      final: JSON text of the last event's data; runs in a thread, as it may read the database.
    """

    async def lines() -> AsyncIterator[str]:
        yield f"retry: {_RETRY_MS}\n\n"
        events = hub.watch(job_id, after, caller)
        try:
            async for event in events:
                if event is None:
                    yield ": still there\n\n"
                    continue
                done = event.name == "done"
                text = await run_in_threadpool(final) if done else json.dumps(event.data)
                yield f"id: {event.seq}\nevent: {event.name}\ndata: {text}\n\n"
        finally:
            await events.aclose()  # type: ignore[attr-defined]  # it is an async generator

    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(lines(), media_type="text/event-stream", headers=headers)
