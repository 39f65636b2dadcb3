"""The families of small programs that a chip is calibrated with.

Each sample is one program on one device. Sizes are those of the layers of real models, small
enough that a family compiles in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

FAMILIES = (
    "matmul", "batched_matmul", "attention", "convolution", "elementwise", "reduction", "gather",
    "scatter", "sort",
)  # fmt: skip

NUMPY_NAMES = {"bf16": "bfloat16", "f32": "float32", "i8": "int8", "i32": "int32"}


@dataclass(frozen=True)
class CalibrationProgram:
    """A program to compile.

    Attributes:
      family: one of `FAMILIES`.
      dtype: element type of its data.
      sizes: its sizes by name.
      arguments: shape and element type of every argument.
      function: of those arguments, in JAX.
    """

    family: str
    dtype: str
    sizes: dict[str, int]
    arguments: tuple[tuple[tuple[int, ...], str], ...]
    function: Callable[..., Any]


_MATMULS = (
    (4096, 4096, 4096), (64, 4096, 4096), (4096, 128, 4096), (512, 4096, 4096), (2048, 2048, 2048),
)  # fmt: skip
_BATCHED = ((32, 512, 64, 512), (32, 512, 512, 64), (16, 1024, 128, 1024), (16, 1024, 1024, 128))
_ATTENTIONS = ((64, 1024, 64), (32, 1024, 128))
_CONVOLUTIONS = (
    (32, 28, 3, 128, 128), (32, 56, 3, 64, 64), (32, 14, 3, 256, 256), (32, 56, 1, 64, 256),
    (16, 112, 7, 3, 64),
)  # fmt: skip
_MOST = {"bf16": 5, "f32": 3, "i8": 1}
"""Shapes of each family that are compiled for a type: products take long to compile."""
_ROWS = (1024, 8192)
_WIDTH = 2048


def programs(family: str, dtypes: tuple[str, ...]) -> Iterator[CalibrationProgram]:
    """The programs of a family in those of some element types that it is compiled in."""
    make = _MAKERS[family]
    for dtype in dtypes:
        if dtype != "i8" or family in ("matmul", "batched_matmul", "elementwise"):
            yield from make(dtype)


def _product(dtype: str, equation: str) -> Callable[..., Any]:
    def product(x: Any, y: Any) -> Any:
        import jax.numpy as jnp

        return jnp.einsum(equation, x, y, preferred_element_type="int32" if dtype == "i8" else None)

    return product


def _matmuls(dtype: str) -> Iterator[CalibrationProgram]:
    for m, k, n in _MATMULS[: _MOST[dtype]]:
        yield CalibrationProgram(
            "matmul",
            dtype,
            {"batch": 1, "m": m, "k": k, "n": n},
            (((m, k), dtype), ((k, n), dtype)),
            _product(dtype, "mk,kn->mn"),
        )


def _batched_matmuls(dtype: str) -> Iterator[CalibrationProgram]:
    for batch, m, k, n in _BATCHED[: _MOST[dtype]]:
        yield CalibrationProgram(
            "batched_matmul",
            dtype,
            {"batch": batch, "m": m, "k": k, "n": n},
            (((batch, m, k), dtype), ((batch, k, n), dtype)),
            _product(dtype, "bmk,bkn->bmn"),
        )


def _attentions(dtype: str) -> Iterator[CalibrationProgram]:
    def attention(query: Any, key: Any, value: Any) -> Any:
        import jax
        import jax.numpy as jnp

        scores = jnp.einsum("bqd,btd->bqt", query, key).astype("float32")
        mask = jnp.tril(jnp.ones(scores.shape[1:], bool))
        weights = jax.nn.softmax(jnp.where(mask, scores * query.shape[-1] ** -0.5, -1e9), axis=-1)
        return jnp.einsum("bqt,btd->bqd", weights.astype(query.dtype), value)

    for heads, length, size in _ATTENTIONS[: _MOST[dtype] // 2]:
        shape = ((heads, length, size), dtype)
        sizes = {"heads": heads, "length": length, "size": size}
        yield CalibrationProgram("attention", dtype, sizes, (shape,) * 3, attention)


def _convolutions(dtype: str) -> Iterator[CalibrationProgram]:
    def convolution(x: Any, kernel: Any) -> Any:
        from jax import lax

        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)

    for batch, size, window, features_in, features_out in _CONVOLUTIONS[: _MOST[dtype]]:
        yield CalibrationProgram(
            "convolution",
            dtype,
            {
                "batch": batch,
                "size": size,
                "window": window,
                "features_in": features_in,
                "features_out": features_out,
            },
            (
                ((batch, size, size, features_in), dtype),
                ((window, window, features_in, features_out), dtype),
            ),
            convolution,
        )


def _elementwise(dtype: str) -> Iterator[CalibrationProgram]:
    def chain(*arrays: Any) -> Any:
        first, *others = arrays
        total = first * first + first
        for other in others:
            total = total * other
        return total

    def exponentials(x: Any) -> Any:
        import jax.numpy as jnp

        for _ in range(16):
            x = jnp.exp(x) * x
        return x

    for rows in _ROWS:
        shape = ((rows, _WIDTH), dtype)
        sizes = {"elements": rows * _WIDTH}
        for reads in (1, 2, 3):
            about = sizes | {"reads": reads, "operations": reads + 1, "transcendental": 0}
            yield CalibrationProgram("elementwise", dtype, about, (shape,) * reads, chain)
        if dtype != "i8":
            about = sizes | {"reads": 1, "operations": 48, "transcendental": 16}
            yield CalibrationProgram("elementwise", dtype, about, (shape,), exponentials)


def _reductions(dtype: str) -> Iterator[CalibrationProgram]:
    for rows in _ROWS:
        for axis in (0, 1):

            def reduction(x: Any, y: Any, axis: int = axis) -> Any:
                return (x * y).sum(axis, dtype="float32")

            shape = ((rows, _WIDTH), dtype)
            sizes = {"elements": rows * _WIDTH, "axis": axis}
            yield CalibrationProgram("reduction", dtype, sizes, (shape,) * 2, reduction)


_TABLE = 32768


def _gathers(dtype: str) -> Iterator[CalibrationProgram]:
    def gather(table: Any, rows: Any) -> Any:
        return table[rows]

    for rows, width in ((8192, 128), (8192, 768), (4096, 4096)):
        arguments = (((_TABLE, width), dtype), ((rows,), "i32"))
        yield CalibrationProgram("gather", dtype, {"rows": rows, "width": width}, arguments, gather)


def _scatters(dtype: str) -> Iterator[CalibrationProgram]:
    def scatter(table: Any, rows: Any, updates: Any) -> Any:
        return table.at[rows].add(updates)

    for rows, width in ((8192, 128), (8192, 768)):
        arguments = (((_TABLE, width), dtype), ((rows,), "i32"), ((rows, width), dtype))
        sizes = {"rows": rows, "width": width}
        yield CalibrationProgram("scatter", dtype, sizes, arguments, scatter)


def _sorts(dtype: str) -> Iterator[CalibrationProgram]:
    def sort(x: Any) -> Any:
        import jax.numpy as jnp

        return jnp.sort(x, axis=-1)

    for rows, length in ((256, 4096),):
        sizes = {"elements": rows * length, "length": length}
        yield CalibrationProgram("sort", dtype, sizes, (((rows, length), dtype),), sort)


_MAKERS = {
    "matmul": _matmuls,
    "batched_matmul": _batched_matmuls,
    "attention": _attentions,
    "convolution": _convolutions,
    "elementwise": _elementwise,
    "reduction": _reductions,
    "gather": _gathers,
    "scatter": _scatters,
    "sort": _sorts,
}
