"""Records of a sweep as one table: Parquet, CSV or JSON."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwright.batch.journal import Record
from shardwright.errors import InputError

SUFFIXES = (".parquet", ".csv", ".json")


def flat(records: Sequence[Record]) -> list[dict[str, Any]]:
    """A row for each record, all with the same columns: the point, its options, what came out."""
    names = list(dict.fromkeys(name for record in records for name in record.point.options))
    rows = []
    for record in records:
        row = record.row.model_dump(mode="json", exclude={"mesh_axes", "meets_goal"})
        row = {k: v for k, v in row.items() if not k.startswith("run_")}
        mesh = record.row.mesh_axes
        rows.append(
            {
                "target": record.point.target,
                **{f"option_{name}": record.point.options.get(name) for name in names},
                **row,
                "mesh": None if mesh is None else ",".join(f"{k}={v}" for k, v in mesh.items()),
                "tokens_per_step": record.tokens_per_step,
                "memory_fraction": record.point.memory_fraction,
                "time_limit_s": record.point.time_limit_s,
                "seed": record.point.seed,
                "seconds": record.seconds,
            }
        )
    return rows


def check_table(path: Path) -> None:
    """Makes sure that a table can be written in the form that its name says.

    Raises:
      InputError: the name says no known form, or what writes it is not installed.
    """
    if path.suffix not in SUFFIXES:
        raise InputError(
            f"{path.suffix or 'no suffix'} is no form of table",
            where=str(path),
            do=f"Give a name that ends in {', '.join(SUFFIXES)}",
        )
    if path.suffix == ".parquet":
        try:
            import pyarrow  # noqa: F401
        except ImportError:
            raise InputError(
                "Parquet needs pyarrow",
                where=str(path),
                do="pip install 'shardwright[sweep]', or write .csv or .json",
            ) from None


def write_table(records: Sequence[Record], path: Path) -> None:
    """Writes a table in the form that its name says."""
    rows = flat(records)
    if path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1) + "\n")
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else [])
            writer.writeheader()
            writer.writerows(rows)
    else:
        _write_parquet(rows, path)


def _write_parquet(rows: Sequence[dict[str, Any]], path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    columns = {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}
    for name, values in columns.items():
        # A column has one type: options of several types are text.
        kinds = {type(value) for value in values if value is not None}
        if len(kinds) > 1 and not kinds <= {int, float}:
            columns[name] = [None if value is None else str(value) for value in values]
    parquet.write_table(pyarrow.table(columns), path)
