"""Programs that were uploaded: files by content, rows by owner."""

from __future__ import annotations

import re
from pathlib import Path

import sqlalchemy as sa

from shardwright.api.store import tables
from shardwright.api.store.database import Database
from shardwright.api.store.files import Files
from shardwright.api.store.jobs import Jobs
from shardwright.api.store.records import ProgramRecord

_programs = tables.programs
_ID = re.compile(r"[0-9a-f]{64}")


class Programs:
    """The programs of a store."""

    def __init__(self, database: Database, files: Files, jobs: Jobs) -> None:
        self._database = database
        self._files = files
        self._jobs = jobs

    def add(
        self,
        owner: str,
        program_id: str,
        upload: Path,
        kind: str,
        queue_limit: int,
        key_id: str | None = None,
    ) -> tuple[ProgramRecord, bool]:
        """Takes in an uploaded file and has it looked into by a job.

        Args:
          program_id: SHA-256 of the file, in hex.
          upload: the file, which is moved away.
          kind: "exported", "stablehlo-text" or "stablehlo-bytecode".

        Returns:
          The program, and whether it is new to this owner. One that could not be read is looked
          into again.

        Raises:
          QueueFullError: too many jobs wait.
        """
        if not _ID.fullmatch(program_id):
            raise ValueError(f"{program_id!r} is not a SHA-256")
        path = f"programs/{program_id[:2]}/{program_id}"
        nbytes = upload.stat().st_size
        known = self.get(owner, program_id)
        if known is not None and known.status != "invalid" and self._files.exists(path):
            upload.unlink()
            return known, False
        # The file comes before the row: a crash between leaves a file that the next upload of
        # the same content replaces, and never a row without its file.
        self._files.put(upload, path)
        with self._database.write() as session:
            row = {
                "owner": owner,
                "id": program_id,
                "kind": kind,
                "nbytes": nbytes,
                "status": "inspecting",
                "created_at": self._database.now(session),
                "path": path,
            }
            self._jobs.submit_in(
                session,
                owner,
                "inspect",
                {"program": program_id},
                queue_limit,
                key_id=key_id,
                quota=None,
            )
            mine = (_programs.c.owner == owner, _programs.c.id == program_id)
            found = session.execute(sa.select(_programs).where(*mine)).mappings().first()
            if found is None:
                statement = sa.insert(_programs).values(row).returning(*_programs.c)
                return _record(session.execute(statement).mappings().one()), True
            if found["status"] == "invalid":
                again = {"status": "inspecting", "error": None}
                changed = sa.update(_programs).where(*mine).values(again).returning(*_programs.c)
                found = session.execute(changed).mappings().one()
            return _record(found), False

    def get(self, owner: str | None, program_id: str) -> ProgramRecord | None:
        """A program of an owner (of any, where None)."""
        wanted = sa.select(_programs).where(_programs.c.id == program_id)
        if owner is not None:
            wanted = wanted.where(_programs.c.owner == owner)
        with self._database.read() as session:
            row = session.execute(wanted.limit(1)).mappings().first()
        return None if row is None else _record(row)

    def list(self, owner: str | None, limit: int = 50) -> list[ProgramRecord]:
        """The newest programs of an owner (of all, where None)."""
        wanted = sa.select(_programs).order_by(
            _programs.c.created_at.desc(), _programs.c.owner, _programs.c.id
        )
        if owner is not None:
            wanted = wanted.where(_programs.c.owner == owner)
        with self._database.read() as session:
            return [_record(row) for row in session.execute(wanted.limit(limit)).mappings()]


def _record(row: sa.RowMapping) -> ProgramRecord:
    return ProgramRecord(**row)
