"""Comparisons: the plans of one program or model on many slices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from shardwright.api.store import tables
from shardwright.api.store.database import Database
from shardwright.api.store.ids import new_id, request_digest
from shardwright.api.store.jobs import Jobs
from shardwright.api.store.leases import job_of
from shardwright.api.store.records import Comparison, Job

_comparisons = tables.comparisons


class Comparisons:
    """The comparisons of a store."""

    def __init__(self, database: Database, jobs: Jobs) -> None:
        self._database = database
        self._jobs = jobs

    def create(
        self,
        owner: str,
        request: Mapping[str, Any],
        plans: Mapping[str, Mapping[str, Any]],
        queue_limit: int,
        *,
        key_id: str | None = None,
        quota_per_day: int | None = None,
    ) -> tuple[Comparison, bool]:
        """Submits the plans of a comparison, all or none, and notes which they are.

        Args:
          request: the comparison as it was asked for.
          plans: topology -> request of its plan.

        Returns:
          The comparison, and whether it is new: one of the same plans is not made again.

        Raises:
          QueueFullError, QuotaExceededError: not all of them can be taken.
        """
        with self._database.write() as session:
            ids = []
            for topology, plan in plans.items():
                job, _ = self._jobs.submit_in(
                    session, owner, "plan", plan, queue_limit, key_id=key_id, quota=quota_per_day
                )
                ids.append([topology, job.id])
            digest = request_digest("compare", {"request": request, "plans": ids})
            same = (_comparisons.c.owner == owner, _comparisons.c.digest == digest)
            known = session.execute(sa.select(_comparisons).where(*same)).mappings().first()
            if known is not None:
                return _record(known), False
            row = {
                "id": new_id("cmp_"),
                "owner": owner,
                "request": dict(request),
                "digest": digest,
                "created_at": self._database.now(session),
                "plans": ids,
            }
            made = sa.insert(_comparisons).values(row).returning(*_comparisons.c)
            return _record(session.execute(made).mappings().one()), True

    def get(self, owner: str | None, comparison_id: str) -> Comparison | None:
        """A comparison of an owner (of any, where None)."""
        wanted = sa.select(_comparisons).where(_comparisons.c.id == comparison_id)
        if owner is not None:
            wanted = wanted.where(_comparisons.c.owner == owner)
        with self._database.read() as session:
            row = session.execute(wanted).mappings().first()
        return None if row is None else _record(row)

    def list(self, owner: str | None, limit: int = 50) -> list[Comparison]:
        """The newest comparisons of an owner (of all, where None)."""
        wanted = sa.select(_comparisons).order_by(
            _comparisons.c.created_at.desc(), _comparisons.c.id
        )
        if owner is not None:
            wanted = wanted.where(_comparisons.c.owner == owner)
        with self._database.read() as session:
            return [_record(row) for row in session.execute(wanted.limit(limit)).mappings()]

    def jobs(self, comparison: Comparison) -> dict[str, Job]:
        """The plans of a comparison as they are now: topology -> job."""
        wanted = sa.select(tables.jobs).where(tables.jobs.c.id.in_(comparison.plans.values()))
        with self._database.read() as session:
            rows = session.execute(wanted).mappings()
            found = {job.id: job for job in map(job_of, rows)}
        return {topology: found[job_id] for topology, job_id in comparison.plans.items()}


def _record(row: sa.RowMapping) -> Comparison:
    return Comparison(
        id=row["id"],
        owner=row["owner"],
        request=row["request"],
        created_at=row["created_at"],
        plans=dict(row["plans"]),
    )
