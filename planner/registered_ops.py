"""Registered custom calls as kernels: functions that call their target on arrays of any size."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from math import prod
from typing import Any

import jax
import numpy as np
from jax._src.interpreters.mlir import dtype_to_ir_type

from shardwright.errors import InputError
from shardwright.planner.kernel_ops import KernelInfo
from shardwright.planner.kernel_rule import KernelRule, solve_sizes
from shardwright.planner.kernels import Kernel, KernelCall

_DTYPES = (
    "float32", "bfloat16", "float16", "float64", "int8", "uint8", "int16", "uint16", "int32",
    "uint32", "int64", "uint64", "bool", "complex64", "complex128",
)  # fmt: skip


def registered_call(op: Any, info: KernelInfo) -> KernelCall:
    """A registered custom call as the call of a kernel.

    The kernel calls the target without attributes: they are put on it in its place.

    Raises:
      InputError: an array has an element type that numpy and JAX do not have.
    """
    operands, results = (
        tuple((tuple(v.type.shape), _dtype(v.type.element_type)) for v in values)
        for values in (op.operands, op.results)
    )
    return _known_call(info.name, info.operands, info.results, operands, results)


@functools.lru_cache(maxsize=256)
def _known_call(name: str, ins: Any, outs: Any, operands: Any, results: Any) -> KernelCall:
    rule = KernelRule(name, ins, outs, frozenset(), frozenset())
    whole = rule.sizes([s for s, _ in operands], [s for s, _ in results], name)
    dtypes = tuple(dtype for _, dtype in results)
    call = functools.partial(_call_target, rule, whole, dtypes)
    made = Kernel(call, None, rule, 0.0, None, None, None, name)
    arrays = tuple(jax.ShapeDtypeStruct(*array) for array in operands)
    return KernelCall(made, jax.tree.structure(arrays), arrays)


def _call_target(
    rule: KernelRule, whole: dict[str, int], dtypes: Sequence[Any], *operands: Any
) -> Any:
    """Calls a target on local arrays; factors that no operand has are whole."""
    sizes = whole | solve_sizes(
        (dim, size)
        for dims, operand in zip(rule.operands, operands, strict=True)
        for dim, size in zip(dims, operand.shape, strict=True)
    )
    results = tuple(
        jax.ShapeDtypeStruct(tuple(prod(sizes[f] for f in dim) for dim in dims), dtype)
        for dims, dtype in zip(rule.results, dtypes, strict=True)
    )
    return jax.ffi.ffi_call(rule.text, results)(*operands)


def _dtype(element_type: Any) -> Any:
    for name in _DTYPES:
        if dtype_to_ir_type(np.dtype(name)) == element_type:
            return np.dtype(name)
    raise InputError(
        f"a registered custom call has arrays of {element_type}",
        where="kernels",
        do="Register calls with arrays of ordinary types",
    )
