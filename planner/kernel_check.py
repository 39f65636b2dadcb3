"""Whether a kernel computes from shards what it computes from whole arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from shardwright.errors import InputError
from shardwright.planner.kernel_rule import Dims, KernelRule


def check_shards(
    function: Callable[..., list[Any]],
    rule: KernelRule,
    leaves: Sequence[Any],
    where: str,
    rtol: float,
    atol: float,
) -> None:
    """Runs a function on whole arrays and on shards of them, along one factor after another.

    Raises:
      InputError: the shards' results are not shards of the whole results.
    """
    run = jax.jit(function)
    results = [np.asarray(r) for r in run(*leaves)]
    arrays = [np.asarray(leaf) for leaf in leaves]
    sizes = rule.sizes([a.shape for a in arrays], [r.shape for r in results], where)
    for factor in rule.shardable:
        parts = _smallest_divisor(sizes[factor])
        if parts == 1:
            continue
        added = [np.zeros_like(r) for r in results]
        for part in range(parts):

            def shard(
                array: Any, dims: Dims, factor: str = factor, part: int = part, parts: int = parts
            ) -> Any:
                return _shard(array, dims, sizes, factor, part, parts)

            cut = [shard(a, dims) for a, dims in zip(arrays, rule.operands, strict=True)]
            made = [np.asarray(r) for r in run(*cut)]
            wanted = [shard(r, dims) for r, dims in zip(results, rule.results, strict=True)]
            if factor in rule.reduction:
                added = [total + m for total, m in zip(added, made, strict=True)]
                made, wanted = (added, results) if part == parts - 1 else ([], [])
            _compare(made, wanted, factor, part, parts, where, rtol, atol)


def _compare(
    made: Sequence[Any],
    wanted: Sequence[Any],
    factor: str,
    part: int,
    parts: int,
    where: str,
    rtol: float,
    atol: float,
) -> None:
    for number, (ours, whole) in enumerate(zip(made, wanted, strict=True)):
        ours, whole = (np.asarray(x, dtype=np.float64) for x in (ours, whole))
        if ours.shape != whole.shape:
            told = f"has shape {ours.shape} where {whole.shape} is wanted"
        elif not np.allclose(ours, whole, rtol=rtol, atol=atol, equal_nan=True):
            told = f"differs by up to {np.nanmax(np.abs(ours - whole)):.3g}"
        else:
            continue
        raise InputError(
            f"from part {part} of {parts} along {factor}, result {number} {told}",
            where=where,
            do=f"Name {factor} in whole=, or in reduction= where shards are partial sums",
        )


def _shard(
    array: Any, dims: Dims, sizes: Mapping[str, int], factor: str, part: int, parts: int
) -> Any:
    """One of several equal parts of an array along a factor; all of it where it has none."""
    flat = [f for dim in dims for f in dim]
    if factor not in flat:
        return array
    length = sizes[factor] // parts
    axis = flat.index(factor)
    by_factor = array.reshape([sizes[f] for f in flat])
    cut = by_factor.take(range(part * length, (part + 1) * length), axis=axis)
    local = dict(sizes) | {factor: length}
    return cut.reshape([int(np.prod([local[f] for f in dim])) for dim in dims])


def _smallest_divisor(size: int) -> int:
    return next((d for d in range(2, size + 1) if size % d == 0), 1)
