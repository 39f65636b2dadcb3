"""Kernels in a module: what `sw.kernel` makes, registered custom calls, and raw Pallas kernels."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shardwright.errors import InputError
from shardwright.extensions import load_extensions
from shardwright.planner.kernel_costs import (
    MXU,
    Cost,
    check_cost,
    cost_expression,
    evaluate_cost,
)
from shardwright.planner.kernel_rule import Dims, KernelRule, parse_rule, solve_sizes
from shardwright.planner.mlir import ir

KERNEL_TARGET = "shardwright.kernel"
"""Target of the custom call that stands for a kernel until its program is lowered."""

KERNEL_ATTRIBUTE = "shardwright.kernel"
PALLAS_TARGET = "tpu_custom_call"

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


class KernelInfo(BaseModel):
    """One call of a kernel, as a module tells it.

    Attributes:
      sizes: of the factors, in the order of the rule.
      operands, results: names of the factors of every dimension of every array.
      whole: factors that may not be sharded.
      reduction: factors over which shards of the results are partial sums.
      flops: matrix FLOPs of one call, an expression of the local sizes of factors.
      hbm_bytes: bytes that it moves; every operand and result once where None.
      temp_bytes: bytes of HBM that it allocates while it runs; none where None.
      efficiency: fraction of peak FLOP/s reached; that of large matrix products where None.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(max_length=1000)
    sizes: dict[str, int]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    whole: tuple[str, ...]
    reduction: tuple[str, ...]
    flops: str
    hbm_bytes: str | None
    temp_bytes: str | None
    efficiency: float | None = Field(gt=0, le=1)

    @property
    def costs(self) -> dict[str, str]:
        """The expressions that are given, by kind."""
        told = {
            "flops": self.flops, "hbm_bytes": self.hbm_bytes, "temp_bytes": self.temp_bytes
        }  # fmt: skip
        return {kind: cost for kind, cost in told.items() if cost is not None}

    @property
    def factors(self) -> tuple[str, ...]:
        """The names of the factors, in the order of the rule's numbers."""
        return tuple(self.sizes)

    def needed_flops(self) -> float:
        """Matrix FLOPs of one call of the whole kernel, without padding."""
        return float(evaluate_cost(self.flops, {**self.sizes, MXU: 1}))


@dataclass(frozen=True)
class PallasCost:
    """What a raw Pallas kernel says of its own cost; None where it says nothing.

    Attributes:
      flops: FLOPs of one call.
      hbm_bytes: bytes of one call.
    """

    flops: float | None
    hbm_bytes: float | None


@dataclass(frozen=True)
class RegisteredOp:
    """A custom call of which the rule and the cost are known; made by `register_op`."""

    rule: KernelRule
    costs: Mapping[str, Cost | None]
    efficiency: float | None


_REGISTERED: dict[str, RegisteredOp] = {}


def register_op(
    target: str,
    *,
    rule: str,
    flops: Cost,
    hbm_bytes: Cost | None = None,
    temp_bytes: Cost | None = None,
    whole: str = "",
    reduction: str = "",
    efficiency: float | None = None,
) -> None:
    """Registers the sharding rule and the cost of custom calls of a target.

    They are planned as calls of `sw.kernel` are, and under a plan run in a `shard_map`: with the
    attributes that they have, on local arrays. So what is called must take arrays of any size.
    Calls with arrays of other ranks are not meant.

    Args:
      target: what the custom calls name (`jax.ffi.ffi_call`'s first argument).
      rule, flops, hbm_bytes, temp_bytes, whole, reduction, efficiency: as for `sw.kernel`.

    Raises:
      InputError: the rule does not parse, or the target is that of Pallas kernels, which are
        compiled for one size.
    """
    where = f"custom call {target}"
    if target in (PALLAS_TARGET, KERNEL_TARGET):
        raise InputError(
            "a Pallas kernel is compiled for the size that it was traced with",
            where=where,
            do="Wrap the function that calls it in sw.kernel",
        )
    costs = {"flops": flops, "hbm_bytes": hbm_bytes, "temp_bytes": temp_bytes}
    told = parse_rule(rule, whole, reduction, where)
    _REGISTERED[target] = RegisteredOp(told, costs, efficiency)


def is_registered(op: Any) -> bool:
    """Whether an operation is a custom call with a registered rule."""
    load_extensions()
    return target_of(op) in _REGISTERED


def describe_call(
    name: str,
    rule: KernelRule,
    costs: Mapping[str, Cost | None],
    efficiency: float | None,
    operands: Sequence[Sequence[int]],
    results: Sequence[Sequence[int]],
    dtypes: Sequence[str],
    where: str,
    unbatched: KernelRule | None = None,
    vmapped: Sequence[str] = (),
) -> KernelInfo:
    """The rule and the cost of one call.

    Args:
      operands, results: their shapes.
      dtypes: element types of the operands, as StableHLO writes them.
      unbatched: the rule that cost functions know, where the call is vmapped.
      vmapped: the factors that it is vmapped over.

    Raises:
      InputError: the arrays do not fit the rule, or a cost cannot be computed.
    """
    sizes = rule.sizes(operands, results, where)
    told = {}
    for kind, cost in costs.items():
        if cost is not None:
            text = cost_expression(cost, unbatched or rule, sizes, dtypes, where)
            told[kind] = " * ".join([f"({text})", *vmapped])
            check_cost(told[kind], sizes, kind, where)
    return KernelInfo(
        name=name,
        sizes=sizes,
        operands=rule.operands,
        results=rule.results,
        whole=tuple(sorted(rule.whole)),
        reduction=tuple(sorted(rule.reduction)),
        efficiency=efficiency,
        flops=told["flops"],
        hbm_bytes=told.get("hbm_bytes"),
        temp_bytes=told.get("temp_bytes"),
    )


def target_of(op: Any) -> str:
    """The target of a custom call; "" for other operations."""
    if op.name != "stablehlo.custom_call":
        return ""
    return str(ir.StringAttr(op.attributes["call_target_name"]).value)


def read_kernel(op: Any) -> KernelInfo | None:
    """What is known of a kernel's call; None where an operation is no call of one.

    Raises:
      InputError: it is damaged.
    """
    target = target_of(op)
    if target in _REGISTERED:
        return _registered_info(op, target)
    if target != KERNEL_TARGET or KERNEL_ATTRIBUTE not in op.attributes:
        return None
    try:
        text = str(ir.StringAttr(op.attributes[KERNEL_ATTRIBUTE]).value)
        info = KernelInfo.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        told = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise _damaged(told) from None
    where = f"kernel {info.name}"
    whole, reduction = frozenset(info.whole), frozenset(info.reduction)
    rule = KernelRule(info.name, info.operands, info.results, whole, reduction)
    before, after = ([tuple(v.type.shape) for v in values] for values in (op.operands, op.results))
    marked = whole | reduction
    if rule.sizes(before, after, where) != info.sizes or not marked <= set(info.sizes):
        raise _damaged("its factors are not those of its arrays")
    for kind, cost in info.costs.items():
        check_cost(cost, info.sizes, kind, where)
    return info


def _registered_info(op: Any, target: str) -> KernelInfo | None:
    """What is registered for a custom call; None where it has arrays of other ranks."""
    known = _REGISTERED[target]
    operands, results = (
        [tuple(v.type.shape) for v in values] for values in (op.operands, op.results)
    )
    told = [len(dims) for dims in (*known.rule.operands, *known.rule.results)]
    if told != [len(shape) for shape in (*operands, *results)]:
        return None
    dtypes = [str(v.type.element_type) for v in op.operands]
    where = f"custom call {target}"
    return describe_call(
        target, known.rule, known.costs, known.efficiency, operands, results, dtypes, where
    )


def local_sizes(
    info: KernelInfo, operands: Sequence[IntArray], results: Sequence[IntArray]
) -> dict[str, IntArray]:
    """The local size of every factor, shape (strategies,), from local shapes (strategies, rank)."""
    arrays = zip((*info.operands, *info.results), (*operands, *results), strict=True)
    return solve_sizes(
        (dim, shape[:, column]) for dims, shape in arrays for column, dim in enumerate(dims)
    )


def pallas_cost(op: Any) -> PallasCost | None:
    """The cost that a raw Pallas kernel was given (`cost_estimate=`); None for other operations."""
    if target_of(op) != PALLAS_TARGET:
        return None
    try:
        config = json.loads(str(ir.StringAttr(op.attributes["backend_config"]).value))
        told: Mapping[str, Any] = config["custom_call_config"]["cost_estimate"]
        return PallasCost(float(told["flops"]), float(told["bytes_accessed"]))
    except (KeyError, TypeError, ValueError):
        return PallasCost(None, None)


def _damaged(told: str) -> InputError:
    return InputError(
        f"what the program tells of a kernel is damaged ({told[:200]})",
        where="program",
        do="Write the program again with Program.to_stablehlo",
    )
