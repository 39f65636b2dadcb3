"""What a sweep has finished: one line of JSON a point, written at once."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from pydantic import BaseModel, ConfigDict, ValidationError

from shardwright.batch.grid import Point
from shardwright.errors import InputError
from shardwright.planner.comparison_rows import ComparisonRow

_TRY_AGAIN = ("crashed", "internal")
"""Points that ended so are tried again by the next run."""


class Record(BaseModel):
    """A finished point.

    Attributes:
      seconds: that planning it took.
      tokens_per_step: of its model, where known.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    key: str
    point: Point
    row: ComparisonRow
    tokens_per_step: float | None
    seconds: float

    @property
    def final(self) -> bool:
        """Whether planning it again would find the same."""
        return self.row.status not in _TRY_AGAIN


class Journal:
    """The file of finished points, open for adding to it."""

    def __init__(self, file: IO[bytes], records: dict[str, Record]) -> None:
        self._file = file
        self.records = records

    def add(self, record: Record) -> None:
        """Writes a record, and returns when it is on the disk."""
        self._file.write(record.model_dump_json().encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.records[record.key] = record


@contextmanager
def open_journal(path: Path) -> Iterator[Journal]:
    """Opens a journal, new or to go on with; a line that was cut off in the middle goes.

    Raises:
      InputError: it cannot be written, another run has it open, or it is no journal.
    """
    try:
        file = path.open("a+b")
    except OSError as error:
        raise InputError(
            f"the journal cannot be written ({error.strerror})", where=str(path), do="Check it"
        ) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                "another sweep is writing it", where=str(path), do="Wait for it, or give another"
            ) from None
        yield Journal(file, _read(file, path))


def _read(file: IO[bytes], path: Path) -> dict[str, Record]:
    file.seek(0)
    data = file.read()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        file.truncate(whole)
    records = {}
    for number, line in enumerate(data[:whole].splitlines(), start=1):
        try:
            record = Record.model_validate_json(line)
        except ValidationError as error:
            fault = error.errors()[0]
            where = ".".join(map(str, fault["loc"])) or "line"
            raise InputError(
                f"line {number} is no finished point ({where}: {fault['msg']})",
                where=str(path),
                do="Give the journal of a sweep of this version, or a path that is free",
            ) from None
        records[record.key] = record
    return records
