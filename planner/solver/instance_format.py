"""Reads and writes the published instance format of the intra-operator parallelism contest.

Source: google/iopddl (ASPLOS/EuroSys 2025 contest), `problem` object in JSON: `nodes.intervals`,
`nodes.costs`, `nodes.usages`, `edges.nodes`, `edges.costs` (row-major), `usage_limit`.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.errors import InputError
from shardwright.planner.solver.problem import Edge, MemoryTerm, Problem, validate

_MOST_BYTES = 2**62
"""Of all nodes together, so that 64 bits hold sums."""


def read_instance(path: Path) -> Problem:
    """The problem in a `.json` or `.json.gz` file; all tables int64.

    Raises:
      InputError: the file cannot be read, is not JSON, or does not follow the format.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(
            error.strerror or str(error), where=str(path), do="give a readable file"
        ) from error
    try:
        document = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except (ValueError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(
            f"not JSON ({error})", where=str(path), do="give an instance in the published format"
        ) from error
    try:
        return _parse(_member(document, "problem", dict, ""))
    except InputError as error:
        where = f"{path}: {error.where}" if error.where else str(path)
        raise InputError(error.what, where=where, do=error.do) from error


def write_solution(choices: Sequence[int], path: Path) -> None:
    """Write the chosen strategies as one JSON list."""
    try:
        path.write_text(json.dumps([int(c) for c in choices]) + "\n")
    except OSError as error:
        raise InputError(
            error.strerror or str(error), where=str(path), do="give a path that can be written"
        ) from error


def _parse(content: dict[str, Any]) -> Problem:
    nodes = _member(content, "nodes", dict, "problem")
    edges = _member(content, "edges", dict, "problem") if "edges" in content else {}
    costs = tuple(
        _integers(row, f"costs of node {n}")
        for n, row in enumerate(_member(nodes, "costs", list, "nodes"))
    )
    tables = []
    for number, (a, b, row) in enumerate(_pairs(edges)):
        where = f"edge {number}"
        if not (0 <= a < len(costs) and 0 <= b < len(costs)):
            raise InputError(f"joins {a} and {b}", where=where, do="number nodes from 0")
        table, shape = _integers(row, where), (len(costs[a]), len(costs[b]))
        if table.size != shape[0] * shape[1]:
            raise InputError(
                f"{table.size} costs for {shape[0]} x {shape[1]} pairs of strategies",
                where=where,
                do="list them row by row",
            )
        tables.append(Edge(a, b, table.reshape(shape)))
    limit = _limit(content.get("usage_limit"))
    problem = Problem(costs, tuple(tables), _memory(nodes, limit), limit)
    validate(problem)
    return problem


def _pairs(edges: dict[str, Any]) -> list[tuple[int, int, Any]]:
    """Both nodes and the row of costs of each edge."""
    if not edges:
        return []
    ends, costs = (_member(edges, key, list, "edges") for key in ("nodes", "costs"))
    if len(ends) != len(costs):
        raise InputError(
            f"{len(costs)} costs for {len(ends)} edges", where="edges", do="give one each"
        )
    return [(*_two(pair, f"edge {n}"), costs[n]) for n, pair in enumerate(ends)]


def _memory(nodes: dict[str, Any], limit: int | None) -> tuple[MemoryTerm, ...]:
    """What nodes hold, on a time of which only the points where an interval begins or ends count.

    Usages that are far over the limit are cut, so that sums stay within 64 bits.
    """
    count = len(nodes["costs"])
    intervals, usages = (_member(nodes, key, list, "nodes") for key in ("intervals", "usages"))
    for key, found in (("intervals", intervals), ("usages", usages)):
        if len(found) != count:
            raise InputError(
                f"{len(found)} {key} for {count} nodes", where="nodes", do="give one each"
            )
    spans = [_two(pair, f"interval of node {n}") for n, pair in enumerate(intervals)]
    for n, (start, _) in enumerate(spans):
        if start < 0:
            raise InputError(
                f"begins at {start}", where=f"interval of node {n}", do="count time from 0"
            )
    points = {
        time: place
        for place, time in enumerate(sorted({t for s in spans if s[0] < s[1] for t in s}))
    }
    most = _MOST_BYTES // max(count, 1)
    terms = []
    for n, ((start, end), row) in enumerate(zip(spans, usages, strict=True)):
        where = f"usages of node {n}"
        usage = _integers(row, where)
        if (usage > most).any():
            if limit is None or limit >= most:
                raise InputError(
                    "usages that may add up to more than 2^62",
                    where=where,
                    do="tell usages and limit in a larger unit",
                )
            usage = np.minimum(usage, most)
        held = (points[start], points[end]) if start < end else (0, 0)
        terms.append(MemoryTerm(n, *held, usage))
    return tuple(terms)


def _limit(limit: Any) -> int | None:
    """Whole units of the limit."""
    if limit is None:
        return None
    number = isinstance(limit, int | float) and not isinstance(limit, bool)
    if not number or not math.isfinite(limit) or limit < 0:
        raise InputError(
            f"a limit of {limit!r}", where="usage_limit", do="give a number that is not negative"
        )
    return int(limit)


def _member(within: Any, key: str, kind: type, where: str) -> Any:
    """A member of an object of the document."""
    if not isinstance(within, dict) or not isinstance(within.get(key), kind):
        what = "an object" if kind is dict else "a list"
        raise InputError(
            f"lacks {key!r}, {what}", where=where, do="give an instance in the published format"
        )
    return within[key]


def _two(pair: Any, where: str) -> tuple[int, int]:
    """Two whole numbers."""
    if not (isinstance(pair, list) and len(pair) == 2 and all(type(n) is int for n in pair)):
        raise InputError(f"{pair!r}", where=where, do="give two whole numbers")
    return pair[0], pair[1]


def _integers(row: Any, where: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    try:
        table = np.array(row)
    except ValueError:  # lists of different lengths
        table = np.zeros(())
    if table.ndim == 1 and (table.dtype.kind == "i" or not table.size):
        return table.astype(np.int64)
    if isinstance(row, list) and all(type(n) is int for n in row):
        raise InputError("a number beyond 64 bits", where=where, do="give smaller numbers")
    raise InputError("not a list of whole numbers", where=where, do="give a list of whole numbers")
