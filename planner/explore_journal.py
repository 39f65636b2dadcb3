"""What an exploration has finished: a line of JSON for what it explores, then one a point."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shardwright.errors import InputError
from shardwright.planner.explore_model import PointModel
from shardwright.planner.explore_space import key_of


class ExplorationJournal:
    """A file of finished points, which a later run goes on with."""

    def __init__(self, path: str | Path, about: Mapping[str, Any]) -> None:
        """Opens a journal, new or to go on with; a line that was cut off in the middle goes.

        Args:
          path: of the file.
          about: what is explored; a journal of something else is refused.

        Raises:
          InputError: it cannot be read or written, is no journal, or one of something else.
        """
        self._path = Path(path)
        self.points: dict[str, PointModel] = {}
        try:
            text = self._path.read_bytes() if self._path.exists() else b""
            whole = text[: text.rfind(b"\n") + 1]
            lines = whole.splitlines()
            self._check(lines, about)
            self.points = self._read(lines[1:])
            self._file = self._path.open("ab")
            if len(whole) < len(text):
                self._file.truncate(len(whole))
            if not lines:
                self._write({"exploration": dict(about)})
        except OSError as error:
            raise InputError(
                f"the journal cannot be kept ({error.strerror})",
                where=str(path),
                do="Give a path that can be written",
            ) from None

    def add(self, point: PointModel) -> None:
        """Writes a point, and returns when it is on the disk."""
        self.points[key_of(point.values)] = point
        self._write({"point": point.model_dump(mode="json")})

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def _check(self, lines: list[bytes], about: Mapping[str, Any]) -> None:
        if not lines:
            return
        try:
            found = json.loads(lines[0])["exploration"]
        except (ValueError, KeyError, TypeError):
            raise self._foreign("is no journal of an exploration") from None
        differing = sorted(k for k in about if found.get(k) != json.loads(json.dumps(about[k])))
        if differing:
            raise self._foreign(f"is of another exploration (its {', '.join(differing)})")

    def _read(self, lines: list[bytes]) -> dict[str, PointModel]:
        points = {}
        for line in lines:
            try:
                point = PointModel.model_validate(json.loads(line)["point"])
            except (ValueError, KeyError, TypeError, ValidationError):
                raise self._foreign("has a line that is no point of this version") from None
            points[key_of(point.values)] = point
        return points

    def _foreign(self, problem: str) -> InputError:
        return InputError(
            f"the file {problem}",
            where=str(self._path),
            do="Give the journal of the same exploration, or a path that is free",
        )
