"""Reads and writes the published instance format of the intra-operator parallelism contest.

Source: google/iopddl (ASPLOS/EuroSys 2025 contest), `problem` object in JSON: `nodes.intervals`,
`nodes.costs`, `nodes.usages`, `edges.nodes`, `edges.costs` (row-major), `usage_limit`.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.errors import InputError
from shardwright.planner.solver.problem import Edge, MemoryTerm, Problem, validate


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
        problem = _parse(document["problem"])
    except InputError as error:
        raise InputError(error.what, where=f"{path}: {error.where}", do=error.do) from error
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        what = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise InputError(
            what, where=str(path), do="give an instance in the published format"
        ) from error
    return problem


def write_solution(choices: Sequence[int], path: Path) -> None:
    """Write the chosen strategies as one JSON list."""
    try:
        path.write_text(json.dumps([int(c) for c in choices]) + "\n")
    except OSError as error:
        raise InputError(
            error.strerror or str(error), where=str(path), do="give a path that can be written"
        ) from error


def _parse(content: dict[str, Any]) -> Problem:
    nodes = content["nodes"]
    edges = content.get("edges", {"nodes": [], "costs": []})
    limit = content.get("usage_limit")
    for key in ("intervals", "usages"):
        if len(nodes[key]) != len(nodes["costs"]):
            raise InputError(
                f"{len(nodes[key])} {key} for {len(nodes['costs'])} nodes",
                where="nodes",
                do="give one each",
            )
    if len(edges["nodes"]) != len(edges["costs"]):
        raise InputError(
            f"{len(edges['costs'])} costs for {len(edges['nodes'])} edges",
            where="edges",
            do="give one each",
        )
    costs = tuple(_integers(row, f"costs of node {n}") for n, row in enumerate(nodes["costs"]))
    memory = tuple(
        MemoryTerm(n, int(start), int(end), _integers(usage, f"usages of node {n}"))
        for n, ((start, end), usage) in enumerate(
            zip(nodes["intervals"], nodes["usages"], strict=True)
        )
    )
    pairs = edges["nodes"]
    tables = []
    for number, ((a, b), row) in enumerate(zip(pairs, edges["costs"], strict=True)):
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
    problem = Problem(costs, tuple(tables), memory, None if limit is None else int(limit))
    validate(problem)
    return problem


def _integers(row: list[int], where: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    table = np.array(row)
    if table.dtype.kind != "i" and table.size:
        raise InputError("numbers that are not integers", where=where, do="give whole numbers")
    return table.astype(np.int64)
