"""Jobs: accepted once, leased to one dispatcher at a time, finished once.

Whoever runs a job holds its lease: a token that the row and the runner share. Every change that a
runner makes names its token and changes nothing where the row has another, so that a runner that
was thought dead can do no harm, and a job that was cancelled stays so.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import sqlalchemy as sa
from sqlalchemy.orm import Session

from shardwright.api.store import tables
from shardwright.api.store.database import Database
from shardwright.api.store.ids import new_id, request_digest
from shardwright.api.store.process import is_dead
from shardwright.api.store.records import Claim, Job, JobEvent, JobKind
from shardwright.errors import InputError

MOST_ATTEMPTS = 3
"""A job whose servers died this often is given up: it is likely that it kills them."""
MOST_CRASHES = 2
"""A job whose workers crashed this often is given up."""
_PREFIXES: dict[JobKind, str] = {"plan": "pln_", "evaluate": "evl_", "inspect": "ins_"}
_WANTED = ("queued", "running", "succeeded")

_jobs, _events = tables.jobs, tables.job_events


class QueueFullError(Exception):
    """As many jobs wait as may."""


class QuotaExceededError(Exception):
    """A key has asked for as many plans as it may.

    Attributes:
      until: when it may ask again.
    """

    def __init__(self, until: datetime) -> None:
        super().__init__(f"the quota is used up until {until.isoformat()}")
        self.until = until


class Jobs:
    """The jobs of a store."""

    def __init__(self, database: Database, keep_events: int) -> None:
        self._database = database
        self._keep_events = keep_events

    # -- asking --------------------------------------------------------------------------------

    def submit(
        self,
        owner: str,
        kind: JobKind,
        request: Mapping[str, Any],
        queue_limit: int,
        *,
        key_id: str | None = None,
        quota_per_day: int | None = None,
    ) -> tuple[Job, bool]:
        """Accepts a job, or finds the one that did or does the same for this owner.

        Args:
          quota_per_day: plans that the key may ask for in 24 hours; None is no limit.

        Returns:
          The job, and whether it is new.

        Raises:
          QueueFullError: `queue_limit` jobs wait already.
          QuotaExceededError: the key's quota is used up.
        """
        with self._database.write() as session:
            return self.submit_in(
                session, owner, kind, request, queue_limit, key_id=key_id, quota=quota_per_day
            )

    def submit_in(
        self,
        session: Session,
        owner: str,
        kind: JobKind,
        request: Mapping[str, Any],
        queue_limit: int,
        *,
        key_id: str | None,
        quota: int | None,
    ) -> tuple[Job, bool]:
        """As `submit`, in a transaction of the caller's."""
        self._database.lock_submissions(session)
        digest = request_digest(kind, request)
        same = sa.select(_jobs).where(
            _jobs.c.owner == owner, _jobs.c.digest == digest, _jobs.c.status.in_(_WANTED)
        )
        if known := session.execute(same).mappings().first():
            return job_of(known), False
        waiting = sa.select(sa.func.count()).where(_jobs.c.status == "queued")
        if session.execute(waiting.select_from(_jobs)).scalar_one() >= queue_limit:
            raise QueueFullError
        now = self._database.now(session)
        if kind == "plan" and quota is not None and key_id is not None:
            _check_quota(session, key_id, quota, now)
        model = request.get("model")
        row = {
            "id": new_id(_PREFIXES[kind]),
            "kind": kind,
            "owner": owner,
            "key_id": key_id,
            "request": dict(request),
            "digest": digest,
            "topology": request.get("topology"),
            "model": model.get("name") if isinstance(model, Mapping) else None,
            "program": request.get("program"),
            "status": "queued",
            "created_at": now,
            "attempts": 0,
            "crashes": 0,
            "events": 0,
            "progress": {},
            "files": {},
        }
        made = session.execute(sa.insert(_jobs).values(row).returning(*_jobs.c)).mappings().one()
        return job_of(made), True

    def cancel(self, owner: str | None, job_id: str) -> Job | None:
        """Cancels a job that is not final yet; its runner ends it when it next looks.

        Returns:
          The job as it is now; None where the owner has none of this id.
        """
        with self._database.write() as session:
            changed = (
                sa.update(_jobs)
                .where(_owned(owner, job_id), _jobs.c.status.in_(("queued", "running")))
                .values(status="cancelled", finished_at=self._database.now(session), **_NO_LEASE)
                .returning(*_jobs.c)
            )
            row = session.execute(changed).mappings().first()
            if row is not None:
                self._add_event(session, row, "done", {"status": "cancelled"})
                return job_of(row)
        return self.get(owner, job_id)

    # -- looking -------------------------------------------------------------------------------

    def get(self, owner: str | None, job_id: str) -> Job | None:
        """A job of an owner (of any, where None)."""
        with self._database.read() as session:
            found = session.execute(sa.select(_jobs).where(_owned(owner, job_id)))
            row = found.mappings().first()
            return None if row is None else job_of(row)

    def page(
        self,
        owner: str | None,
        *,
        kind: JobKind = "plan",
        status: str | None = None,
        topology: str | None = None,
        model: str | None = None,
        program: str | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> tuple[list[Job], str | None]:
        """Jobs, newest first.

        Args:
          cursor: what the page before returned.

        Returns:
          The page, and the cursor of the next one; None at the end.

        Raises:
          InputError: the cursor is not one.
        """
        wanted = [_jobs.c.kind == kind]
        for column, value in (
            (_jobs.c.owner, owner),
            (_jobs.c.status, status),
            (_jobs.c.topology, topology),
            (_jobs.c.model, model),
            (_jobs.c.program, program),
        ):
            if value is not None:
                wanted.append(column == value)
        if cursor is not None:
            at, last = _read_cursor(cursor)
            wanted.append(sa.tuple_(_jobs.c.created_at, _jobs.c.id) < sa.tuple_(at, last))
        newest = sa.select(_jobs).where(*wanted)
        newest = newest.order_by(_jobs.c.created_at.desc(), _jobs.c.id.desc()).limit(limit + 1)
        with self._database.read() as session:
            found = [job_of(row) for row in session.execute(newest).mappings()]
        more = len(found) > limit
        return found[:limit], _cursor(found[limit - 1]) if more else None

    def events(self, job_id: str, after_seq: int = 0, limit: int = 500) -> list[JobEvent]:
        """Events of a job after one that is known, in order."""
        wanted = (
            sa.select(_events)
            .where(_events.c.job_id == job_id, _events.c.seq > after_seq)
            .order_by(_events.c.seq)
            .limit(limit)
        )
        with self._database.read() as session:
            return [JobEvent(**row) for row in session.execute(wanted).mappings()]

    def newest_events(self, job_ids: Collection[str]) -> dict[str, int]:
        """Number of the newest event of each of several jobs, in one query; 0 before the first."""
        wanted = sa.select(_jobs.c.id, _jobs.c.events).where(_jobs.c.id.in_(job_ids))
        with self._database.read() as session:
            return {job_id: int(newest) for job_id, newest in session.execute(wanted)}

    def counts(self) -> dict[str, int]:
        """How many jobs wait and run."""
        wanted = (
            sa.select(_jobs.c.status, sa.func.count())
            .where(_jobs.c.status.in_(("queued", "running")))
            .group_by(_jobs.c.status)
        )
        with self._database.read() as session:
            found = {status: int(number) for status, number in session.execute(wanted)}
        return {"queued": 0, "running": 0} | found

    # -- running -------------------------------------------------------------------------------

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
        if not self.counts()["queued"]:
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
                self._add_event(session, row, "progress", progress)
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
                again = self._leased(session, claim, status="queued", **_NO_LEASE)
                assert again is not None, "the lease was held a statement ago"
                self._add_event(session, again, "progress", _WAITS_AGAIN)
                return job_of(again)
        return self.fail(claim, error)

    def release(self, claim: Claim) -> Job | None:
        """Queues a job again that its dispatcher gives back, as if it had never been started."""
        with self._database.write() as session:
            attempts = _jobs.c.attempts - 1
            row = self._leased(session, claim, status="queued", attempts=attempts, **_NO_LEASE)
            if row is None:
                return None
            self._add_event(session, row, "progress", _GIVEN_BACK)
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
                changes: dict[str, Any] = {"status": "queued", **_NO_LEASE}
                if ends:
                    changes |= {"status": "failed", "finished_at": now, "error": _LOST}
                changed = sa.update(_jobs).where(*mine).values(changes).returning(*_jobs.c)
                row = session.execute(changed).mappings().first()
                if row is None:
                    continue
                if ends:
                    self._ended(session, row)
                else:
                    self._add_event(session, row, "progress", _WAITS_AGAIN)
                found.append(job_of(row))
        return found

    def _end(self, claim: Claim, status: str, **values: Any) -> Job | None:
        with self._database.write() as session:
            now = self._database.now(session)
            row = self._leased(
                session, claim, status=status, finished_at=now, **values, **_NO_LEASE
            )
            if row is not None:
                self._ended(session, row)
            return None if row is None else job_of(row)

    def _ended(self, session: Session, row: sa.RowMapping) -> None:
        """What else changes with a job that has ended."""
        self._add_event(session, row, "done", {"status": row["status"]})
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

    def _add_event(
        self, session: Session, row: sa.RowMapping, name: str, data: Mapping[str, Any]
    ) -> None:
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


_NO_LEASE: dict[str, Any] = {"lease_token": None, "lease_holder": None, "lease_until": None}
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


def _owned(owner: str | None, job_id: str) -> sa.ColumnElement[bool]:
    mine = _jobs.c.id == job_id
    return mine if owner is None else sa.and_(mine, _jobs.c.owner == owner)


def _check_quota(session: Session, key_id: str, quota: int, now: datetime) -> None:
    since = now - timedelta(days=1)
    mine = (_jobs.c.key_id == key_id, _jobs.c.kind == "plan", _jobs.c.created_at > since)
    asked: Sequence[datetime] = (
        session.execute(
            sa.select(_jobs.c.created_at)
            .where(*mine)
            .order_by(_jobs.c.created_at.desc())
            .limit(quota)
        )
        .scalars()
        .all()
    )
    if len(asked) >= quota:
        raise QuotaExceededError(asked[-1] + timedelta(days=1))


def _cursor(job: Job) -> str:
    text = json.dumps([job.created_at.isoformat(), job.id])
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _read_cursor(cursor: str) -> tuple[datetime, str]:
    with contextlib.suppress(ValueError, TypeError, OverflowError, binascii.Error):
        padded = cursor + "=" * (-len(cursor) % 4)
        at, last = cast("tuple[str, str]", json.loads(base64.urlsafe_b64decode(padded)))
        moment = datetime.fromisoformat(at)
        if moment.tzinfo is not None and re.fullmatch(r"[a-z2-7_]{1,40}", last):
            return moment.astimezone(UTC), last
    raise InputError(
        "this is not a cursor that a page gave", where="cursor", do="Take next_cursor of a page"
    )
