"""AmoebaNet-D: images through cells that evolution found, each fed by the two cells before it.

A cell combines ten operations in pairs; normal cells keep the size of space, reduction cells halve
it and have twice the filters. A convolution of more than one place works on a quarter of the
filters, between two of one place.

Source: Real et al., Regularized Evolution for Image Classifier Architecture Search (2018), figure 1
  (cells) and its appendix (AmoebaNet-D), with what normal cells hand on as in the authors'
  implementation (tensorflow/tpu, models/official/amoeba_net). Without its auxiliary head and
  dropped paths.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

import jax
import jax.numpy as jnp

from shardwright.models.convolution import (
    average_pool,
    batch_norm,
    convolve,
    init_batch_norm,
    init_convolution,
    labelled_images,
    max_pool,
    pooled_logits,
)
from shardwright.models.options import AmoebaNetOptions
from shardwright.models.training import Batch, PyTree, cross_entropy

Kernels = tuple[tuple[int, int], ...]

_CONVOLUTIONS: dict[str, Kernels] = {
    "1x1": ((1, 1),),
    "3x3": ((1, 1), (3, 3), (1, 1)),
    "1x7 7x1": ((1, 1), (1, 7), (7, 1), (1, 1)),
}
"""Kernels of each operation that convolves, one after the other."""
_NORMAL = (
    (1, "1x1"), (1, "max 3"), (1, "none"), (0, "1x7 7x1"), (0, "1x1"), (0, "1x7 7x1"),
    (2, "max 3"), (2, "none"), (1, "average 3"), (5, "1x1"),
)  # fmt: skip
_REDUCTION = (
    (0, "max 2"), (0, "max 3"), (2, "none"), (1, "3x3"), (2, "1x7 7x1"),
    (2, "max 3"), (3, "none"), (1, "max 2"), (2, "average 3"), (3, "1x1"),
)  # fmt: skip
"""Operations, and the state that each works on: states 0 and 1 are what the cell is given, and
every two operations add up to the next."""
_KEPT = {False: (0, 3, 4, 6), True: (4, 5, 6)}
"""States that a cell hands on, side by side: of a normal cell, and of one that reduces."""


@dataclass(frozen=True)
class Cell:
    """A cell, and what comes into it.

    Attributes:
      filters: of each state inside.
      reduces: whether it halves space.
      channels: of what the cell before it made, and the one before that.
      sizes: places along a side of these.
    """

    name: str
    filters: int
    reduces: bool
    channels: tuple[int, int]
    sizes: tuple[int, int]

    @property
    def size(self) -> int:
        """Places along a side of what it makes."""
        return ceil(self.sizes[0] / 2) if self.reduces else self.sizes[0]

    @property
    def made(self) -> int:
        """Channels of what it makes."""
        return len(_KEPT[self.reduces]) * self.filters

    def convolutions(self) -> dict[str, tuple[Kernels, int, int, int, int]]:
        """Of each: its kernels, channels in, filters out, places a side going in, and stride."""
        found: dict[str, tuple[Kernels, int, int, int, int]] = {}
        found["previous"] = (((1, 1),), self.channels[0], self.filters, self.sizes[0], 1)
        if self.sizes[0] != self.sizes[1] or self.channels[1] != self.filters:
            shrink = ceil(self.sizes[1] / self.sizes[0])
            found["before"] = (((1, 1),), self.channels[1], self.filters, self.sizes[1], shrink)
        for number, (state, name) in enumerate(_REDUCTION if self.reduces else _NORMAL):
            given = state < 2
            stride = 2 if self.reduces and given else 1
            size = self.sizes[0] if given else self.size
            kernels = _CONVOLUTIONS.get(name, ((1, 1),) if name == "none" and stride > 1 else ())
            if kernels:
                found[f"op{number}"] = (kernels, self.filters, self.filters, size, stride)
        return found


def cells(options: AmoebaNetOptions) -> list[Cell]:
    """All cells in their order: two that reduce, then three groups of normal ones.

    Between groups one reduces.
    """
    filters, made = options.width // 4, options.width // 4
    size = ceil(options.image / 2)
    channels, sizes = (made, made), (size, size)
    found: list[Cell] = []
    third = ["normal"] * (options.cells // 3)
    for kind in ["reduce", "reduce", *third, "reduce", *third, "reduce", *third]:
        filters *= 2 if kind == "reduce" else 1
        cell = Cell(f"cell{len(found)}", filters, kind == "reduce", channels, sizes)
        channels, sizes = (cell.made, channels[0]), (cell.size, sizes[0])
        found.append(cell)
    return found


def init_params(options: AmoebaNetOptions, key: jax.Array) -> PyTree:
    """Parameters, by cell and convolution."""
    made = cells(options)
    stem_key, head_key, *keys = jax.random.split(key, 2 + len(made))
    dtype = options.param_dtype
    head = 0.01 * jax.random.normal(head_key, (made[-1].made, options.classes), dtype)
    return {
        "stem": _init_unit(stem_key, (3, 3), 3, options.width // 4, dtype),
        **{cell.name: _init_cell(cell, key, dtype) for cell, key in zip(made, keys, strict=True)},
        "head": {"w": head, "b": jnp.zeros(options.classes, dtype)},
    }


def _init_cell(cell: Cell, key: jax.Array, dtype: str) -> PyTree:
    convolutions = cell.convolutions()
    keys = iter(jax.random.split(key, 4 * len(convolutions)))
    return {
        name: [
            _init_unit(next(keys), space, wide, out, dtype)
            for space, wide, out in _widths(kernels, channels, filters)
        ]
        for name, (kernels, channels, filters, _, _) in convolutions.items()
    }


def _widths(
    kernels: Kernels, channels: int, filters: int
) -> Iterator[tuple[tuple[int, int], int, int]]:
    """Of each kernel: its places, channels in and filters out; a quarter of them inside."""
    for number, space in enumerate(kernels):
        last = number == len(kernels) - 1
        out = filters if last else filters // 4
        yield space, channels, out
        channels = out


def _init_unit(
    key: jax.Array, space: tuple[int, int], channels: int, filters: int, dtype: str
) -> PyTree:
    return {
        "kernel": init_convolution(key, space, channels, filters, dtype),
        "norm": init_batch_norm(filters, dtype),
    }


def apply(
    options: AmoebaNetOptions, params: PyTree, statistics: PyTree, images: jax.Array
) -> tuple[jax.Array, PyTree]:
    """Logits [batch, classes] of images [batch, height, width, 3], and the new statistics."""
    x, seen = apply_stem(options, params["stem"], statistics["stem"], images)
    given, new = (x, x), {"stem": seen}
    for cell in cells(options):
        given, new[cell.name] = apply_cell(
            options, cell, params[cell.name], statistics[cell.name], given
        )
    return apply_head(params["head"], given[0]), new


def apply_stem(
    options: AmoebaNetOptions, weights: PyTree, old: PyTree, images: jax.Array
) -> tuple[jax.Array, PyTree]:
    """What the cells are given first, and the new statistics."""
    x = convolve(images.astype(options.compute_dtype), weights["kernel"], 2)
    return batch_norm(weights["norm"], old, x, options.norm_groups)


def apply_head(head: PyTree, x: jax.Array) -> jax.Array:
    """Logits of what the last cell makes."""
    return pooled_logits(head, jax.nn.relu(x))


def apply_cell(
    options: AmoebaNetOptions,
    cell: Cell,
    weights: PyTree,
    old: PyTree,
    given: tuple[jax.Array, jax.Array],
) -> tuple[tuple[jax.Array, jax.Array], PyTree]:
    """What the next cell is given, and the new statistics.

    Args:
      given: what the cell before it made and the one before that, [batch, height, width, channels].
    """
    convolutions = cell.convolutions()
    new: dict[str, list[PyTree]] = {}

    def convolved(x: jax.Array, name: str) -> jax.Array:
        kernels, _, _, _, stride = convolutions[name]
        units, new[name] = zip(kernels, weights[name], old[name], strict=True), []
        for number, (space, unit, seen) in enumerate(units):
            strides = _strides(kernels, number, space, stride)
            x = convolve(jax.nn.relu(x), unit["kernel"], strides)
            x, statistics = batch_norm(unit["norm"], seen, x, options.norm_groups)
            new[name].append(statistics)
        return x

    def operated(x: jax.Array, number: int, name: str, stride: int) -> jax.Array:
        if f"op{number}" in convolutions:
            return convolved(x, f"op{number}")
        if name == "none":
            return x
        kind, window = name.split()
        pool = max_pool if kind == "max" else average_pool
        return pool(x, int(window), stride)

    before = convolved(given[1], "before") if "before" in convolutions else given[1]
    states = [convolved(given[0], "previous"), before]
    operations = _REDUCTION if cell.reduces else _NORMAL
    for number in range(0, len(operations), 2):
        pair = []
        for offset in (0, 1):
            state, name = operations[number + offset]
            stride = 2 if cell.reduces and state < 2 else 1
            pair.append(operated(states[state], number + offset, name, stride))
        states.append(pair[0] + pair[1])
    made = jnp.concatenate([states[state] for state in _KEPT[cell.reduces]], axis=-1)
    return (made, given[0]), new


def _strides(kernels: Kernels, number: int, space: tuple[int, int], stride: int) -> tuple[int, int]:
    """Of one kernel of several: those with the most places stride, each along its own dimension."""
    if len(kernels) == 1:
        return (stride, stride)
    inside = 0 < number < len(kernels) - 1
    return (
        stride if inside and space[0] > 1 else 1,
        stride if inside and space[1] > 1 else 1,
    )


def loss(
    options: AmoebaNetOptions, params: PyTree, statistics: PyTree, batch: Batch
) -> tuple[jax.Array, PyTree]:
    """Mean cross-entropy of batch["images"] with batch["labels"], and the new statistics."""
    logits, new = apply(options, params, statistics, batch["images"])
    return cross_entropy(logits, batch["labels"]), new


make_batch = labelled_images


def model_flops(options: AmoebaNetOptions) -> int:
    """FLOPs of a step's convolutions and products: three times those of a forward pass."""
    made = cells(options)
    stem = ceil(options.image / 2) ** 2 * 9 * 3 * (options.width // 4)
    macs = stem + made[-1].made * options.classes + sum(map(cell_macs, made))
    return 6 * options.batch * macs


def cell_macs(cell: Cell) -> int:
    """Multiply-adds of a cell's convolutions for an image."""
    macs = 0
    for kernels, channels, filters, size, stride in cell.convolutions().values():
        rows = columns = size
        for number, (space, wide, out) in enumerate(_widths(kernels, channels, filters)):
            down, across = _strides(kernels, number, space, stride)
            rows, columns = ceil(rows / down), ceil(columns / across)
            macs += rows * columns * space[0] * space[1] * wide * out
    return macs
