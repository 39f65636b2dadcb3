"""Planned kernels: `sw.kernel` makes one operation of a function that XLA cannot partition.

XLA refuses to partition Pallas kernels by itself. A call of a `Kernel` is one primitive: lowered
for planning, or under a plan, it is a custom call that carries its sharding rule and its cost;
under a plan that call is then replaced by a `shard_map` (see kernel_lowering). Lowered in any
other way it is the function, or its reference where there is no TPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax._src import dispatch, source_info_util
from jax._src.interpreters import mlir as jax_mlir
from jax.extend.core import Primitive
from jax.interpreters import ad, batching
from jaxlib.mlir.dialects import stablehlo

from shardwright.errors import InputError
from shardwright.planner.kernel_check import check_shards
from shardwright.planner.kernel_costs import Cost
from shardwright.planner.kernel_ops import (
    KERNEL_ATTRIBUTE,
    KERNEL_TARGET,
    KernelInfo,
    describe_call,
)
from shardwright.planner.kernel_rule import KernelRule, parse_rule
from shardwright.planner.mlir import ir

CALL_ATTRIBUTE = "shardwright.kernel_call"

# The line that calls a kernel is the user's, not the one below that binds the primitive.
source_info_util.register_exclusion(__file__)

_OWN_GRADIENT = (
    "Define its gradient with jax.custom_vjp, whose forward and backward functions call kernels: "
    "see docs/extending.md"
)


def kernel(
    fn: Callable[..., Any],
    *,
    rule: str,
    flops: Cost,
    hbm_bytes: Cost | None = None,
    temp_bytes: Cost | None = None,
    reference: Callable[..., Any] | None = None,
    whole: str = "",
    reduction: str = "",
    efficiency: float | None = None,
    name: str | None = None,
) -> Kernel:
    """Wraps a function around a kernel, so that its calls are planned as one operation.

        attend = sw.kernel(
            lambda q, k, v: pallas_attention(q, k, v),
            rule="b h t d, b h s d, b h s d -> b h t d",
            whole="d",
            flops="4 * b * h * t * s * d",
            reference=plain_attention,
        )

    Args:
      fn: a function of arrays, called with the local shards of its operands. It must compute each
        shard of its results from the shards of its operands alone.
      rule: the dimensions of operands and results. Dimensions of one name are sharded alike; a
        dimension "(k g)" consists of two factors. Several results are separated by commas. A
        factor that some result lacks, or no operand has, is never sharded unless `reduction` has
        it.
      flops: matrix FLOPs of one call: a number (of the whole call, of which shards do equal
        parts), an expression of the local sizes of factors ("4 * b * h * t * s * d"; `mxu` is
        the width of the matrix unit), or a function of the local operands, which have `shape`,
        `size`, `itemsize` and `nbytes`. They run at the peak of the largest operand's type.
      hbm_bytes: bytes of one call that the kernel moves between HBM and the core, in the same
        ways; every operand and result once where None.
      temp_bytes: bytes of HBM that the function allocates besides its results while it runs, in
        the same ways; none where None.
      reference: the same function in plain JAX, which runs where there is no TPU.
      whole: further factors that may not be sharded, separated by spaces: those along which the
        shards of a result need other shards of the operands.
      reduction: factors over which shards of the results are partial sums, which are added up.
      efficiency: fraction of the chip's peak FLOP/s that the kernel reaches; that of large
        matrix products where None.
      name: what plans call it; the function's name where None.

    Returns:
      A callable. It has no gradient of its own: put it in a `jax.custom_vjp`. `jax.vmap`,
      `jax.lax.scan`, `jax.checkpoint` and `jax.jit` take it as any other operation. Arrays that
      the function needs must be its arguments.

    Raises:
      InputError: the rule does not parse, or an option is out of range.
    """
    named = fn
    while isinstance(named, functools.partial):
        named = named.func
    called = name if name is not None else str(getattr(named, "__name__", type(named).__name__))
    where = f"kernel {called}"
    if efficiency is not None and not 0 < efficiency <= 1:
        raise InputError(
            f"efficiency={efficiency} is not a fraction", where=where, do="Give one from 0 to 1"
        )
    return Kernel(
        fn=fn,
        reference=reference,
        rule=parse_rule(rule, whole, reduction, where),
        flops=flops,
        hbm_bytes=hbm_bytes,
        temp_bytes=temp_bytes,
        efficiency=efficiency,
        name=called,
    )


@dataclass(frozen=True, eq=False)
class Kernel:
    """A function with a sharding rule and a cost; made by `kernel`.

    Attributes:
      over: the axes of the operands that were vmapped, and the factor of each, innermost first.
    """

    fn: Callable[..., Any]
    reference: Callable[..., Any] | None
    rule: KernelRule
    flops: Cost
    hbm_bytes: Cost | None
    temp_bytes: Cost | None
    efficiency: float | None
    name: str
    over: tuple[tuple[str, tuple[int | None, ...]], ...] = ()
    _batched: dict[Any, Kernel] = field(default_factory=dict, repr=False)

    @property
    def __name__(self) -> str:
        return self.name

    @property
    def where(self) -> str:
        """What errors call it."""
        return f"kernel {self.name}"

    def __call__(self, *args: Any) -> Any:
        """Calls the kernel on arrays (or pytrees of them), one for each operand of its rule.

        Raises:
          InputError: the arrays do not fit the rule, or the function needs traced arrays that
            are not its arguments.
        """
        leaves, in_tree = jax.tree.flatten(args)
        avals = [jax.typeof(leaf) for leaf in leaves]
        operands = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals)
        results, out_tree = self._results(operands, in_tree)
        self.rule.sizes([a.shape for a in operands], [a.shape for a in results], self.where)
        with jax.named_scope(self.name):
            outs = _kernel_p.bind(*leaves, kernel=self, in_tree=in_tree, results=results)
        return jax.tree.unflatten(out_tree, outs)

    def check(self, *args: Any, rtol: float = 1e-3, atol: float = 1e-3) -> None:
        """Checks the rule by running the kernel on small concrete arrays, whole and in parts.

        Every factor that may be sharded is cut in turn (into two, where its size is even). Without
        a TPU the reference runs, so that this belongs in the tests of a kernel's users.

        Raises:
          InputError: the parts' results are not parts of the whole's results: it tells the factor.
        """
        leaves, in_tree = jax.tree.flatten(args)
        on_tpu = jax.default_backend() == "tpu"
        check_shards(self.flat(in_tree, on_tpu), self.rule, leaves, self.where, rtol, atol)

    def flat(self, in_tree: Any, on_tpu: bool) -> Callable[..., list[Any]]:
        """The function, or its reference where there is no TPU, from leaves to leaves."""
        chosen = self.fn if on_tpu or self.reference is None else self.reference

        def function(*leaves: Any) -> list[Any]:
            return list(jax.tree.leaves(chosen(*jax.tree.unflatten(in_tree, leaves))))

        for _, axes in self.over:
            function = jax.vmap(function, in_axes=axes, out_axes=0)
        return function

    def batched(self, axes: tuple[int | None, ...]) -> Kernel:
        """The kernel vmapped over a new axis of some of its operands, now their first."""
        if axes not in self._batched:
            number = len(self.over)
            factor = f"vmap{number}"
            while factor in self.rule.factors:
                number += 1
                factor = f"vmap{number}"
            self._batched[axes] = replace(
                self,
                rule=self.rule.batched(factor, [axis is not None for axis in axes]),
                over=(*self.over, (factor, axes)),
                _batched={},
            )
        return self._batched[axes]

    def describe(
        self, operands: Sequence[Any], results: Sequence[Any], dtypes: Sequence[str]
    ) -> KernelInfo:
        """The rule and the cost of one call.

        Args:
          operands, results: with a `shape` each.
          dtypes: element types of the operands, as StableHLO writes them.

        Raises:
          InputError: a cost cannot be computed.
        """
        costs = {
            "flops": self.flops, "hbm_bytes": self.hbm_bytes, "temp_bytes": self.temp_bytes
        }  # fmt: skip
        return describe_call(
            self.name,
            self.rule,
            costs,
            self.efficiency,
            [a.shape for a in operands],
            [a.shape for a in results],
            dtypes,
            self.where,
            self._unbatched(),
            [factor for factor, _ in self.over],
        )

    def _unbatched(self) -> KernelRule:
        """The rule that the user's cost functions know."""
        rule = self.rule
        for _, axes in reversed(self.over):
            rule = replace(
                rule,
                operands=tuple(
                    dims if axis is None else dims[1:]
                    for dims, axis in zip(rule.operands, axes, strict=True)
                ),
                results=tuple(dims[1:] for dims in rule.results),
            )
        return rule

    def _results(self, operands: tuple[Any, ...], in_tree: Any) -> tuple[tuple[Any, ...], Any]:
        """Shapes and types of the results, and their pytree."""
        return _traced_results(self, operands, in_tree)


@functools.lru_cache(maxsize=512)
def _traced_results(
    of: Kernel, operands: tuple[Any, ...], in_tree: Any
) -> tuple[tuple[Any, ...], Any]:
    chosen = of.fn if of.reference is None else of.reference

    def call(*leaves: Any) -> Any:
        return chosen(*jax.tree.unflatten(in_tree, leaves))

    closed, out = jax.make_jaxpr(call, return_shape=True)(*operands)
    if any(isinstance(const, jax.core.Tracer) for const in closed.consts):
        raise InputError(
            "its function uses arrays of the function around it that are not its arguments",
            where=of.where,
            do="Pass them as arguments, with dimensions in the rule",
        )
    leaves, out_tree = jax.tree.flatten(out)
    return tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves), out_tree


# -- calls in a lowering -------------------------------------------------------------------------


@dataclass(frozen=True)
class KernelCall:
    """One call of a kernel in a program that is being lowered."""

    kernel: Kernel
    in_tree: Any
    operands: tuple[Any, ...]


_CALLS: ContextVar[list[KernelCall] | None] = ContextVar("shardwright_kernel_calls", default=None)


@contextmanager
def planned_calls() -> Iterator[list[KernelCall]]:
    """Inside, kernels are lowered to custom calls; the list tells their calls by number.

    Contexts nest: the outermost one's list is filled.
    """
    calls = _CALLS.get()
    if calls is not None:
        yield calls
        return
    calls = []
    token = _CALLS.set(calls)
    try:
        yield calls
    finally:
        _CALLS.reset(token)


# -- the primitive -------------------------------------------------------------------------------

_kernel_p = Primitive("kernel")
_kernel_p.multiple_results = True
_kernel_p.def_impl(functools.partial(dispatch.apply_primitive, _kernel_p))


def _abstract_eval(*operands: Any, kernel: Kernel, in_tree: Any, results: Any) -> list[Any]:
    return [jax.core.ShapedArray(r.shape, r.dtype) for r in results]


_kernel_p.def_abstract_eval(_abstract_eval)


def _no_gradient(primals: Any, tangents: Any, *, kernel: Kernel, **params: Any) -> Any:
    raise InputError("a kernel has no gradient of its own", where=kernel.where, do=_OWN_GRADIENT)


def _batch(
    args: Sequence[Any], axes: Sequence[Any], *, kernel: Kernel, in_tree: Any, results: Any
) -> Any:
    size = next(a.shape[d] for a, d in zip(args, axes, strict=True) if d is not None)
    moved = [
        a if d is None else jax.numpy.moveaxis(a, d, 0) for a, d in zip(args, axes, strict=True)
    ]
    vmapped = kernel.batched(tuple(None if d is None else 0 for d in axes))
    outs = tuple(jax.ShapeDtypeStruct((size, *r.shape), r.dtype) for r in results)
    return (
        _kernel_p.bind(*moved, kernel=vmapped, in_tree=in_tree, results=outs),
        [0] * len(outs),
    )


def _lower(ctx: Any, *values: Any, on_tpu: bool, kernel: Kernel, in_tree: Any, results: Any) -> Any:
    calls = _CALLS.get()
    if calls is None:
        lowered = jax_mlir.lower_fun(kernel.flat(in_tree, on_tpu), multiple_results=True)
        return lowered(ctx, *values)
    operands = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in ctx.avals_in)
    # The names around the call, which end in the kernel's; JAX would put the primitive's outside.
    place = jax_mlir.source_info_to_location(
        ctx.module_context, None, ctx.name_stack, ctx.traceback
    )
    call = stablehlo.CustomCallOp(
        [jax_mlir.aval_to_ir_type(ctx.module_context, aval) for aval in ctx.avals_out],
        list(values),
        call_target_name=ir.StringAttr.get(KERNEL_TARGET),
        loc=place,
    )
    dtypes = [str(value.type.element_type) for value in call.operands]
    described = kernel.describe(operands, results, dtypes)
    call.attributes[KERNEL_ATTRIBUTE] = ir.StringAttr.get(described.model_dump_json())
    i32 = ir.IntegerType.get_signless(32)
    call.attributes[CALL_ATTRIBUTE] = ir.IntegerAttr.get(i32, len(calls))
    calls.append(KernelCall(kernel, in_tree, operands))
    return list(call.results)


ad.primitive_jvps[_kernel_p] = _no_gradient
batching.primitive_batchers[_kernel_p] = _batch
# Not cached: equal calls that share one function would share one place in the program.
jax_mlir.register_lowering(_kernel_p, functools.partial(_lower, on_tpu=False), cacheable=False)
jax_mlir.register_lowering(
    _kernel_p, functools.partial(_lower, on_tpu=True), platform="tpu", cacheable=False
)
