"""Takes jobs from the store to an engine, and what becomes of them back."""

from __future__ import annotations

import collections
import logging
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from shardwright.api.jobs.engine import (
    Engine,
    Failed,
    JobFailure,
    Progressed,
    Report,
    Succeeded,
    Task,
)
from shardwright.api.store.process import new_holder
from shardwright.api.store.records import Claim, Job
from shardwright.api.store.store import Store

_log = logging.getLogger(__name__)
_STOP_SECONDS = 15.0
_LOOK_SECONDS = 1.0
"""How often the store is looked at for jobs and cancellations that other servers wrote."""
_PROGRESS_SECONDS = 0.5
"""How often the progress of one job is written at most."""
_START_AGAIN_SECONDS = 5.0
_PASSING = (OSError, OperationalError, InterfaceError, PoolTimeoutError)
"""What a store says that is away and may come back."""
_EXPIRE_SECONDS = 60.0
"""How often the store is relieved of what it need not keep any longer."""


@dataclass(frozen=True)
class Observation:
    """Something that became of a job here, for metrics.

    Attributes:
      waited_s: seconds between its submission and this start of it.
      stage_seconds: of a job that succeeded.
    """

    what: Literal["started", "succeeded", "failed", "retried", "cancelled"]
    job: Job
    waited_s: float = 0.0
    stage_seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass
class _Running:
    claim: Claim
    folder: Path
    told_at: float = 0.0
    untold: Mapping[str, Any] | None = None


class Dispatcher:
    """A thread that runs the jobs of a store on an engine.

    Several may work on one store: each job is leased to one of them. What one leaves behind when
    it dies, the others or the next one take over.
    """

    def __init__(
        self,
        store: Store,
        engine: Engine,
        scratch: Path,
        observe: Callable[[Observation], None] = lambda observation: None,
    ) -> None:
        self._store = store
        self._engine = engine
        self._observe = observe
        self._holder = new_holder()
        self._lease_s = store.settings.lease_seconds
        self._running: dict[str, _Running] = {}
        self._scratch = scratch
        self._reports: collections.deque[Report] = collections.deque()
        self._start_trouble = "the engine is starting"
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dispatcher", daemon=True)
        self._healthy_at = 0.0
        self._looked_at = self._renewed_at = self._recovered_at = self._expired_at = 0.0

    def start(self) -> None:
        """Starts the thread, which first takes over what dead servers left."""
        self._healthy_at = time.monotonic()
        self._thread.start()

    def wake(self) -> None:
        """Has the store looked at now: something was submitted or cancelled."""
        self._looked_at = 0.0
        self._engine.wake()

    def stop(self) -> None:
        """Kills the workers and queues their jobs again, for the next server."""
        self._stopping.set()
        self._engine.wake()
        if self._thread.ident is not None:
            # An engine that waits for its cluster cannot be interrupted, and has no jobs yet.
            self._thread.join(_STOP_SECONDS)

    def trouble(self) -> str:
        """Why jobs do not run, in one line for the operator; empty where all is well."""
        if not self._thread.is_alive():
            return "the dispatcher has ended"
        if self._start_trouble:
            return self._start_trouble
        if time.monotonic() - self._healthy_at > self._lease_s:
            return "the dispatcher cannot reach the store"
        return self._engine.trouble()

    def _run(self) -> None:
        try:
            self._start_engine()
            while not self._stopping.is_set():
                try:
                    self._step()
                    self._healthy_at = time.monotonic()
                except Exception:  # the database is away, say: jobs must go on when it is back
                    _log.exception("the dispatcher failed and tries again")
                    self._stopping.wait(_LOOK_SECONDS)
        finally:
            self._give_back()

    def _start_engine(self) -> None:
        while not self._stopping.is_set():
            try:
                self._engine.start()
                self._start_trouble = ""
                return
            except Exception as error:  # a cluster that is not there yet, say
                _log.exception("the engine does not start and is started again")
                reason = str(error).splitlines()[0] if str(error) else repr(error)
                self._start_trouble = f"the engine does not start: {reason}"
                self._stopping.wait(_START_AGAIN_SECONDS)

    def _step(self) -> None:
        now = time.monotonic()
        if now - self._recovered_at > self._lease_s / 3:
            self._recovered_at = now
            for job in self._store.jobs.requeue_lost():
                _log.warning("job %s was lost by its server and is now %s", job.id, job.status)
        if now - self._renewed_at > self._lease_s / 3 and self._running:
            self._renewed_at = now
            self._store.jobs.renew(self._holder, self._lease_s)
        if now - self._expired_at > _EXPIRE_SECONDS:
            self._expired_at = now
            if gone := self._store.expire():
                _log.info("deleted %d jobs and programs that were kept long enough", gone)
        if now - self._looked_at > _LOOK_SECONDS:
            self._looked_at = now
            self._end_unheld()
            self._claim()
        self._reports += self._engine.poll(_PROGRESS_SECONDS)
        while self._reports:
            # A report that cannot be written now, as the store is away, stays for the next time.
            self._settle(self._reports[0])
            self._reports.popleft()
        self._tell_progress()
        if self._engine.free():
            self._claim()

    def _claim(self) -> None:
        while self._engine.free():
            claim = self._store.jobs.claim(self._holder, self._lease_s)
            if claim is None:
                return
            job = claim.job
            folder = Path(tempfile.mkdtemp(prefix="job-", dir=self._scratch))
            self._running[claim.token] = _Running(claim, folder)
            waited = (job.started_at or job.created_at) - job.created_at
            self._tell(Observation("started", job, waited.total_seconds()))
            try:
                self._engine.submit(self._task(claim, folder))
            except FileNotFoundError:
                what = f"the file of the program {job.program} is not there"
                failure = JobFailure("input", what, "program", "Upload the program again")
                self._reports.append(Failed(claim.token, failure))
            except Exception:
                self._forget(claim.token)
                self._store.jobs.release(claim)
                raise

    def _task(self, claim: Claim, folder: Path) -> Task:
        job, files = claim.job, self._store.files
        program = None
        if job.program is not None:
            path = f"programs/{job.program[:2]}/{job.program}"
            program = files.local_path(path)
            if program is None:
                program = folder / "program"
                with files.open(path) as remote, program.open("wb") as local:
                    shutil.copyfileobj(remote, local)
            elif not program.is_file():
                raise FileNotFoundError(program)
        out = folder / "out"
        out.mkdir()
        return Task(claim.token, job.kind, job.request, program, out)

    def _end_unheld(self) -> None:
        """Ends every task whose job was cancelled or taken over."""
        if not self._running:
            return
        held = self._store.jobs.held(self._holder)
        for token in self._running.keys() - held:
            self._engine.cancel(token)
            job = self._store.jobs.get(None, self._running[token].claim.job.id)
            if job is not None and job.status == "cancelled":
                self._tell(Observation("cancelled", job))
            self._forget(token)

    def _settle(self, report: Report) -> None:
        """Writes what became of a task.

        Raises:
          Exception: the store cannot be reached; the report is to be settled later.
        """
        try:
            self._take(report)
        except _PASSING:
            raise
        except Exception as error:  # a result that cannot be kept must not stop all others
            _log.exception("what became of a job cannot be kept")
            what = f"its result cannot be kept: {type(error).__name__}: {str(error)[:300]}"
            self._take(Failed(report.task_id, JobFailure("internal", what, "job", "Report it")))

    def _take(self, report: Report) -> None:
        running = self._running.get(report.task_id)
        if running is None:
            return
        if isinstance(report, Progressed):
            running.untold = report.progress
            return
        if isinstance(report, Failed):
            self._failed(running, report.failure)
        else:
            self._succeeded(running, report)
        self._forget(report.task_id)

    def _succeeded(self, running: _Running, report: Succeeded) -> None:
        claim = running.claim
        # Every attempt has a folder of its own, which the row names once all files are in it: a
        # crash in between, or a second runner, cannot mix the files of two attempts.
        home = claim.job.home
        folder = f"{home}/{claim.token}"
        paths = {name: f"{folder}/{name}" for name in report.files}
        for name, path in paths.items():
            source = running.folder / "out" / name
            if source.exists():  # not, where the store failed after it was put
                self._store.files.put(source, path)
        self._flush(running)
        job = self._store.jobs.finish(claim, report.summary, paths)
        if job is None:
            self._store.files.delete_tree(folder)
            return
        for other in self._store.files.folders(home) if paths else ():
            if other != claim.token:
                self._store.files.delete_tree(f"{home}/{other}")
        self._tell(Observation("succeeded", job, stage_seconds=report.stage_seconds))

    def _failed(self, running: _Running, failure: JobFailure) -> None:
        jobs, error = self._store.jobs, failure.as_error()
        self._flush(running)
        retry = jobs.retry if failure.may_be_retried else jobs.fail
        job = retry(running.claim, error)
        if job is None:
            return
        if job.is_final:
            self._store.files.delete_tree(job.home)
        self._tell(Observation("failed" if job.is_final else "retried", job))

    def _tell_progress(self) -> None:
        now = time.monotonic()
        for running in self._running.values():
            if now - running.told_at > _PROGRESS_SECONDS:
                self._flush(running)

    def _flush(self, running: _Running) -> None:
        if running.untold is not None:
            self._store.jobs.add_event(running.claim, running.untold)
            running.untold, running.told_at = None, time.monotonic()

    def _forget(self, token: str) -> None:
        shutil.rmtree(self._running.pop(token).folder, ignore_errors=True)

    def _tell(self, observation: Observation) -> None:
        try:
            self._observe(observation)
        except Exception:  # a fault in metrics is no reason to lose a job
            _log.exception("an observer failed")

    def _give_back(self) -> None:
        self._engine.stop()
        for token, running in list(self._running.items()):
            try:
                self._store.jobs.release(running.claim)
            except Exception:  # the lease will run out
                _log.exception("job %s could not be given back", running.claim.job.id)
            self._forget(token)
        shutil.rmtree(self._scratch, ignore_errors=True)
