"""Who runs a job: its lease.

Whoever runs a job holds its lease: a token that the row and the runner share. Every change that a
runner makes names its token and changes nothing where the row has another, so that a runner that
was thought dead can do no harm, and a job that was cancelled stays so.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from shardwright.api.store import tables
from shardwright.api.store.database import Database
from shardwright.api.store.process import is_dead
from shardwright.api.store.records import Claim, Job

MOST_ATTEMPTS = 3
"""A job whose servers died this often is given up: it is likely that it kills them."""
MOST_CRASHES = 2
"""A job whose workers crashed this often is given up."""
_jobs, _events = tables.jobs, tables.job_events


class Leases:
    """Jobs as those who run them see them."""

    def __init__(self, database: Database, keep_events: int) -> None:
        self._database = database
        self._keep_events = keep_events

    def claim(self, holder: str, lease_s: float) -> Claim | None:
        """Leases the next job to a dispatcher; None where nothing waits.

        Looking into programs comes first, for it is quick and people wait for it. Otherwise the
        owner with the fewest running jobs is next, so that one who asks for hundreds of plans does
        not keep others waiting; then the oldest job.
        """
        running = _jobs.alias("running")
        busy = (
            sa.select(sa.func.count())
            .where(running.c.status == "running", running.c.owner == _jobs.c.owner)
            .scalar_subquery()
        )
        following = (
            sa.select(_jobs.c.id)
            .where(_jobs.c.status == "queued")
            .order_by(
                sa.case((_jobs.c.kind == "inspect", 0), else_=1),
                busy,
                _jobs.c.created_at,
                _jobs.c.id,
            )
            .limit(1)
            .with_for_update(skip_locked=True)
        )
        waits = sa.select(_jobs.c.id).where(_jobs.c.status == "queued").limit(1)
        with self._database.read() as session:
            if session.execute(waits).first() is None:
                return None
        with self._database.write() as session:
            job_id = session.execute(following).scalar_one_or_none()
            if job_id is None:
                return None
            now = self._database.now(session)
            token = secrets.token_hex(16)
            leased = (
                sa.update(_jobs)
                .where(_jobs.c.id == job_id, _jobs.c.status == "queued")
                .values(
                    status="running",
                    started_at=now,
                    attempts=_jobs.c.attempts + 1,
                    lease_token=token,
                    lease_holder=holder,
                    lease_until=now + timedelta(seconds=lease_s),
                )
                .returning(*_jobs.c)
            )
            row = session.execute(leased).mappings().first()
            return None if row is None else Claim(job_of(row), token)

    def held(self, holder: str) -> set[str]:
        """Tokens of the leases that a dispatcher still holds."""
        wanted = sa.select(_jobs.c.lease_token).where(
            _jobs.c.status == "running", _jobs.c.lease_holder == holder
        )
        with self._database.read() as session:
            return {str(token) for (token,) in session.execute(wanted)}

    def renew(self, holder: str, lease_s: float) -> None:
        """Prolongs every lease of a dispatcher."""
        with self._database.write() as session:
            until = self._database.now(session) + timedelta(seconds=lease_s)
            session.execute(
                sa.update(_jobs)
                .where(_jobs.c.status == "running", _jobs.c.lease_holder == holder)
                .values(lease_until=until)
            )

    def add_event(self, claim: Claim, progress: Mapping[str, Any]) -> bool:
        """Tells how far a job is; False where the lease is lost."""
        with self._database.write() as session:
            row = self._leased(session, claim, progress=dict(progress))
            if row is not None:
                self.note(session, row, "progress", progress)
            return row is not None

    def finish(
        self, claim: Claim, summary: Mapping[str, Any], files: Mapping[str, str]
    ) -> Job | None:
        """Ends a job that succeeded; None where the lease is lost."""
        return self._end(claim, "succeeded", summary=dict(summary), files=dict(files))

    def fail(self, claim: Claim, error: Mapping[str, Any]) -> Job | None:
        """Ends a job that failed; None where the lease is lost.

        Args:
          error: kind, title, detail, what, where, do.
        """
        return self._end(claim, "failed", error=dict(error))

    def retry(self, claim: Claim, error: Mapping[str, Any]) -> Job | None:
        """Queues a job again whose worker crashed, or fails it where that was once too often.

        Returns:
          The job as it is now; None where the lease is lost.
        """
        with self._database.write() as session:
            row = self._leased(session, claim, crashes=_jobs.c.crashes + 1)
            if row is None:
                return None
            if row["crashes"] < MOST_CRASHES:
                again = self._leased(session, claim, status="queued", **NO_LEASE)
                assert again is not None, "the lease was held a statement ago"
                self.note(session, again, "progress", _WAITS_AGAIN)
                return job_of(again)
        return self.fail(claim, error)

    def release(self, claim: Claim) -> Job | None:
        """Queues a job again that its dispatcher gives back, as if it had never been started."""
        with self._database.write() as session:
            attempts = _jobs.c.attempts - 1
            row = self._leased(session, claim, status="queued", attempts=attempts, **NO_LEASE)
            if row is None:
                return None
            self.note(session, row, "progress", _GIVEN_BACK)
            return job_of(row)

    def requeue_lost(self) -> list[Job]:
        """Queues every job again whose dispatcher is dead, and fails those that lost too many.

        A dispatcher is dead when its lease has run out, or when it was a process of this machine
        that is no more.
        """
        leases = (_jobs.c.id, _jobs.c.lease_token, _jobs.c.lease_holder, _jobs.c.lease_until)
        with self._database.read() as session:
            now = self._database.now(session)
            running = sa.select(*leases).where(_jobs.c.status == "running")
            lost = [
                (job_id, token)
                for job_id, token, holder, until in session.execute(running)
                if until is None or until < now or is_dead(holder or "")
            ]
        found = []
        for job_id, token in lost:
            with self._database.write() as session:
                mine = (_jobs.c.id == job_id, _jobs.c.lease_token == token)
                row = session.execute(sa.select(_jobs).where(*mine)).mappings().first()
                if row is None:
                    continue
                ends = row["attempts"] >= MOST_ATTEMPTS
                changes: dict[str, Any] = {"status": "queued", **NO_LEASE}
                if ends:
                    changes |= {"status": "failed", "finished_at": now, "error": _LOST}
                changed = sa.update(_jobs).where(*mine).values(changes).returning(*_jobs.c)
                row = session.execute(changed).mappings().first()
                if row is None:
                    continue
                if ends:
                    self._ended(session, row)
                else:
                    self.note(session, row, "progress", _WAITS_AGAIN)
                found.append(job_of(row))
        return found

    def _end(self, claim: Claim, status: str, **values: Any) -> Job | None:
        with self._database.write() as session:
            now = self._database.now(session)
            row = self._leased(session, claim, status=status, finished_at=now, **values, **NO_LEASE)
            if row is not None:
                self._ended(session, row)
            return None if row is None else job_of(row)

    def _ended(self, session: Session, row: sa.RowMapping) -> None:
        """What else changes with a job that has ended."""
        self.note(session, row, "done", {"status": row["status"]})
        if row["kind"] == "inspect":
            ready = row["status"] == "succeeded"
            session.execute(
                sa.update(tables.programs)
                .where(
                    tables.programs.c.owner == row["owner"],
                    tables.programs.c.id == row["program"],
                )
                .values(
                    status="ready" if ready else "invalid",
                    facts=row["summary"],
                    error=row["error"],
                )
            )

    def _leased(self, session: Session, claim: Claim, **values: Any) -> sa.RowMapping | None:
        """Changes a job whose lease is still held, and returns its row."""
        changed = (
            sa.update(_jobs)
            .where(
                _jobs.c.id == claim.job.id,
                _jobs.c.status == "running",
                _jobs.c.lease_token == claim.token,
            )
            .values(values)
            .returning(*_jobs.c)
        )
        return session.execute(changed).mappings().first()

    def note(
        self, session: Session, row: sa.RowMapping, name: str, data: Mapping[str, Any]
    ) -> None:
        """Adds an event to a job, in a transaction of the caller's; the oldest may go for it."""
        counted = (
            sa.update(_jobs)
            .where(_jobs.c.id == row["id"])
            .values(events=_jobs.c.events + 1)
            .returning(_jobs.c.events)
        )
        seq = session.execute(counted).scalar_one()
        at = self._database.now(session)
        event = {"job_id": row["id"], "seq": seq, "at": at, "name": name, "data": dict(data)}
        session.execute(sa.insert(_events).values(event))
        session.execute(
            sa.delete(_events).where(
                _events.c.job_id == row["id"], _events.c.seq <= seq - self._keep_events
            )
        )


NO_LEASE: dict[str, Any] = {"lease_token": None, "lease_holder": None, "lease_until": None}
_WAITS_AGAIN = {"stage": "queued", "message": "its worker ended unexpectedly; it is tried again"}
_GIVEN_BACK = {"stage": "queued", "message": "its server stops; the next one goes on with it"}
_LOST = {
    "kind": "crashed",
    "title": "The servers that ran the job died",
    "detail": f"The job was started {MOST_ATTEMPTS} times, and each time its server ended before "
    "the job did.",
    "what": f"its server ended {MOST_ATTEMPTS} times before it did",
    "where": "job",
    "do": "Look at the logs of the servers, and submit it again",
}


def job_of(row: Mapping[Any, Any]) -> Job:
    """A row as a record."""
    return Job(**{name: row[name] for name in Job.__dataclass_fields__})
