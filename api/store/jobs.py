"""Jobs: accepted once, looked at by their owners, run under leases."""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import sqlalchemy as sa
from sqlalchemy.orm import Session

from shardwright.api.store import tables
from shardwright.api.store.ids import new_id, request_digest
from shardwright.api.store.leases import NO_LEASE, Leases, job_of
from shardwright.api.store.records import Job, JobEvent, JobKind
from shardwright.errors import InputError

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


class Jobs(Leases):
    """The jobs of a store, for those who ask for them; for those who run them, see `Leases`."""

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
        # Most often it is there already, and then nobody needs to take turns.
        with self._database.read() as session:
            known = _same(session, owner, request_digest(kind, request))
        if known is not None:
            return known, False
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
        if known := _same(session, owner, digest):
            return known, False
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
                .values(status="cancelled", finished_at=self._database.now(session), **NO_LEASE)
                .returning(*_jobs.c)
            )
            row = session.execute(changed).mappings().first()
            if row is not None:
                self.note(session, row, "done", {"status": "cancelled"})
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


def _owned(owner: str | None, job_id: str) -> sa.ColumnElement[bool]:
    mine = _jobs.c.id == job_id
    return mine if owner is None else sa.and_(mine, _jobs.c.owner == owner)


def _same(session: Session, owner: str, digest: str) -> Job | None:
    """The job that did or does the same for an owner."""
    same = sa.select(_jobs).where(
        _jobs.c.owner == owner, _jobs.c.digest == digest, _jobs.c.status.in_(_WANTED)
    )
    row = session.execute(same).mappings().first()
    return None if row is None else job_of(row)


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
