"""What a kernel costs, as arithmetic of the sizes of its factors.

Users give a number, an expression ("4 * b * h * t * s * d") or a function of the local operands.
All become expressions, which a program carries with it into files and to other machines, and which
are evaluated for many shardings at once.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwright.cost_models.memory import dtype_bytes
from shardwright.errors import InputError
from shardwright.planner.kernel_rule import KernelRule

Cost = float | str | Callable[..., Any]
FloatArray = NDArray[np.float64]

MXU = "mxu"
"""Rows and columns of the matrix unit, to which a kernel's products are padded."""

_LONGEST = 4000
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: np.add,
    ast.Sub: np.subtract,
    ast.Mult: np.multiply,
    ast.Div: np.divide,
    ast.FloorDiv: np.floor_divide,
}
_CALLS: dict[str, Callable[..., Any]] = {"min": np.minimum, "max": np.maximum, "ceil": np.ceil}
_HELP = "Use numbers, factors of the rule, mxu, + - * / //, min, max and ceil"


def evaluate_cost(expression: str, sizes: Mapping[str, Any]) -> FloatArray:
    """The value of an expression where factors have these sizes (numbers or arrays alike)."""
    with np.errstate(all="ignore"):
        value: FloatArray = np.asarray(_value(_parsed(expression), sizes), dtype=np.float64)
    return value


def check_cost(expression: str, sizes: Mapping[str, int], kind: str, where: str) -> None:
    """Checks an expression.

    Raises:
      InputError: it does not parse, names what is not a factor, or is no finite positive number
        for the sizes of the call.
    """
    try:
        value = evaluate_cost(expression, dict(sizes) | {MXU: 1})
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f"{kind}={expression[:200]!r} cannot be computed: {reason}", where=where, do=_HELP
        ) from None
    except KeyError as error:
        raise InputError(
            f"{kind}={expression[:200]!r} names {error.args[0]!r}, which is not a factor of the "
            "rule",
            where=where,
            do=f"Its factors are {', '.join(sizes)}",
        ) from None
    if value.shape or not np.isfinite(value) or value < 0:
        raise InputError(
            f"{kind}={expression[:200]!r} is {value} for {dict(sizes)}",
            where=where,
            do="Give what one call costs: a finite number that is not negative",
        )


def cost_expression(
    cost: Cost, rule: KernelRule, sizes: Mapping[str, int], dtypes: Sequence[str], where: str
) -> str:
    """A cost as an expression.

    Args:
      cost: a number is what the whole call costs on one device, of which shards do equal parts.
        A function is given the local operands (`LocalArray`) and computes with their sizes.
      dtypes: element types of the operands, as StableHLO writes them.

    Raises:
      InputError: a function does more than arithmetic, or returns no number.
    """
    if isinstance(cost, str):
        return cost
    if callable(cost):
        operands = [
            LocalArray(tuple(Size(" * ".join(dim)) for dim in dims), dtype_bytes(dtype))
            for dims, dtype in zip(rule.operands, dtypes, strict=True)
        ]
        try:
            return Size.of(cost(*operands)).text
        except TypeError as error:
            raise InputError(
                f"the cost function does not compute with sizes alone: {error}",
                where=where,
                do=f"{_HELP} (min, max and ceil in an expression as text)",
            ) from None
    share = "".join(f" * ({f} / {sizes[f]})" for f in rule.shardable)
    return f"{float(cost)!r}{share}"


class Size:
    """A size that is not known yet: arithmetic with it is written down."""

    def __init__(self, text: str) -> None:
        self.text = f"({text})"

    @staticmethod
    def of(value: Any) -> Size:
        """A number or a size as a size."""
        if isinstance(value, Size):
            return value
        if isinstance(value, bool) or not isinstance(value, int | float | np.number):
            raise TypeError(f"{type(value).__name__} is no number")
        return Size(repr(float(value)))

    def __add__(self, other: Any) -> Size:
        return Size(f"{self.text} + {Size.of(other).text}")

    def __radd__(self, other: Any) -> Size:
        return Size.of(other) + self

    def __sub__(self, other: Any) -> Size:
        return Size(f"{self.text} - {Size.of(other).text}")

    def __rsub__(self, other: Any) -> Size:
        return Size.of(other) - self

    def __mul__(self, other: Any) -> Size:
        return Size(f"{self.text} * {Size.of(other).text}")

    def __rmul__(self, other: Any) -> Size:
        return Size.of(other) * self

    def __truediv__(self, other: Any) -> Size:
        return Size(f"{self.text} / {Size.of(other).text}")

    def __rtruediv__(self, other: Any) -> Size:
        return Size.of(other) / self

    def __floordiv__(self, other: Any) -> Size:
        return Size(f"{self.text} // {Size.of(other).text}")

    def __rfloordiv__(self, other: Any) -> Size:
        return Size.of(other) // self


class LocalArray:
    """An operand of a kernel on one device, as cost functions see it.

    Attributes:
      shape: the local size of each dimension.
      itemsize: bytes of an element.
    """

    def __init__(self, shape: tuple[Size, ...], itemsize: float) -> None:
        self.shape = shape
        self.itemsize = itemsize

    @property
    def size(self) -> Size:
        """Elements of the local array."""
        product = Size.of(1)
        for size in self.shape:
            product = product * size
        return product

    @property
    def nbytes(self) -> Size:
        """Bytes of the local array."""
        return self.size * self.itemsize


@lru_cache(maxsize=256)
def _parsed(expression: str) -> ast.expr:
    if len(expression) > _LONGEST:
        raise ValueError(f"it is longer than {_LONGEST} characters")
    return ast.parse(expression.strip(), mode="eval").body


def _value(node: ast.expr, sizes: Mapping[str, Any]) -> Any:
    if (
        isinstance(node, ast.Constant)
        and isinstance(node.value, int | float)
        and not isinstance(node.value, bool)
    ):
        return np.float64(node.value)
    if isinstance(node, ast.Name):
        return np.asarray(sizes[node.id], dtype=np.float64)
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _BINARY[type(node.op)](_value(node.left, sizes), _value(node.right, sizes))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, sizes)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        function, arguments = _CALLS.get(node.func.id), [_value(a, sizes) for a in node.args]
        wanted = 1 if node.func.id == "ceil" else 2
        if function is not None and len(arguments) == wanted:
            return function(*arguments)
    raise ValueError(f"{ast.unparse(node)!r} is not understood")
