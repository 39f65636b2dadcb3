"""What a store forgets: results that ended long ago, and programs that nothing names any more."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

import sqlalchemy as sa
from sqlalchemy.orm import Session

from shardwright.api.store import tables
from shardwright.api.store.database import Database
from shardwright.api.store.files import Files
from shardwright.api.store.records import FINAL_STATUSES, home_of

_PAGE = 200
_jobs, _programs, _comparisons = tables.jobs, tables.programs, tables.comparisons


def expire(database: Database, files: Files, before: datetime, most: int) -> int:
    """Deletes what is older than a moment: some of it, so that callers can do other things between.

    A comparison goes when it is old; a job when it ended before and no comparison that stays names
    it; an uploaded program when it is old and no job names it. Several servers may do this at once.

    Args:
      most: jobs that are deleted at most, and as many programs.

    Returns:
      How many jobs and programs are gone; 0 where nothing is left to delete.
    """
    with database.write() as session:
        session.execute(sa.delete(_comparisons).where(_comparisons.c.created_at < before))
    with database.read() as session:
        jobs = dict(_old_jobs(session, before, most))
    # Files go first: whoever ends in between leaves rows, which are found again, and no orphans.
    for home in jobs.values():
        files.delete_tree(home)
    with database.write() as session:
        session.execute(
            sa.delete(_jobs).where(_jobs.c.id.in_(jobs), _jobs.c.status.in_(FINAL_STATUSES))
        )
    return len(jobs) + _expire_programs(database, files, before, most)


def _old_jobs(session: Session, before: datetime, most: int) -> Iterator[tuple[str, str]]:
    """Ids of jobs to delete and the folders of their files, oldest first."""
    kept = {
        job_id
        for (plans,) in session.execute(sa.select(_comparisons.c.plans))
        for _, job_id in plans
    }
    old = (
        sa.select(_jobs.c.id, _jobs.c.kind)
        .where(
            _jobs.c.status.in_(FINAL_STATUSES),
            _jobs.c.created_at < before,
            _jobs.c.finished_at < before,
        )
        .order_by(_jobs.c.created_at)
        .execution_options(yield_per=_PAGE)
    )
    for job_id, kind in session.execute(old):
        if job_id in kept:
            continue
        if most == 0:
            return
        most -= 1
        yield job_id, home_of(kind, job_id)


def _expire_programs(database: Database, files: Files, before: datetime, most: int) -> int:
    named = sa.exists().where(_jobs.c.owner == _programs.c.owner, _jobs.c.program == _programs.c.id)
    unused = (_programs.c.created_at < before, ~named)
    with database.write() as session:
        database.lock_submissions(session)
        oldest = sa.select(_programs.c.owner, _programs.c.id, _programs.c.path).where(*unused)
        gone = session.execute(oldest.order_by(_programs.c.created_at).limit(most)).all()
        for owner, program_id, _ in gone:
            mine = (_programs.c.owner == owner, _programs.c.id == program_id)
            session.execute(sa.delete(_programs).where(*mine))
        ids = {program_id for _, program_id, _ in gone}
        others = sa.select(_programs.c.id).where(_programs.c.id.in_(ids))
        shared = set(session.execute(others).scalars())
    for _, program_id, path in gone:
        # The same content may just have been uploaded again, ahead of its row.
        if program_id not in shared and files.modified(path) < before:
            files.delete_tree(path)
    return len(gone)
