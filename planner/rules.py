"""What each operation can shard: Shardy's own sharding rules, read from the module.

A rule maps every dimension of every operand and result to factors; two dimensions with the same
factor are sharded alike. Shardy is the authority; the operations of CHLO, which the compiler
expands or knows how to partition but Shardy gives no rule, get one here, and users register their
own for custom calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from shardwright.planner.kernel_ops import KernelInfo, read_kernel, target_of
from shardwright.planner.mlir import ir, sdy
from shardwright.planner.shifts import shift_of

DimFactors = tuple[tuple[int, ...], ...]
"""For each dimension of a tensor, the factors it consists of, major to minor."""


@dataclass(frozen=True)
class Rule:
    """The sharding rule of one operation.

    Attributes:
      sizes: the size of each factor.
      operands: for each operand, the factors of its dimensions.
      results: for each result, the factors of its dimensions.
      reduction: factors that sharding turns into partial results (an all-reduce follows).
      replicated: factors that cannot be sharded.
      permutation: factors whose shards need their neighbours' elements (halo exchange).
    """

    sizes: tuple[int, ...]
    operands: tuple[DimFactors, ...]
    results: tuple[DimFactors, ...]
    reduction: frozenset[int] = frozenset()
    replicated: frozenset[int] = frozenset()
    permutation: frozenset[int] = frozenset()

    @property
    def passes_through(self) -> bool:
        """True where no factor is special: sharding it costs nothing."""
        return not (self.reduction or self.replicated or self.permutation)


RuleMaker = Callable[[Any], "Rule | None"]
_REGISTERED: dict[str, RuleMaker] = {}
RULE = "sdy.sharding_rule"
"""The attribute in which Shardy keeps the rule of an operation."""

_PAD = "stablehlo.pad"


def register_rule(op_name: str, maker: RuleMaker) -> None:
    """Registers a sharding rule for operations that Shardy has none for.

    The rule says what XLA's partitioner does; it does not change it. XLA partitions CHLO
    operations and the custom calls that have a partitioner of their own. Of any other custom call
    it gathers the operands, whatever is registered here: use `sw.register_op` for those, or wrap
    the function that makes the call in `sw.kernel`; both are lowered to a `shard_map`.

    Args:
      op_name: the MLIR name of the operation, or for custom calls "custom_call:TARGET".
      maker: given the MLIR operation, returns its Rule, or None where it cannot be sharded.
    """
    _REGISTERED[op_name] = maker


class RuleReader:
    """Reads the rules of a module after Shardy's populate pass; equal rules are read once."""

    def __init__(self) -> None:
        self._read: dict[Any, Rule] = {}

    def __call__(self, op: Any) -> Rule | None:
        """The sharding rule of an MLIR operation, or None."""
        attributes = op.attributes
        if RULE not in attributes:
            return own_rule(op)
        attribute = attributes[RULE]
        shifted = tuple(shift_of(op)) if op.name == _PAD else ()
        if shifted:
            return self._shifting(attribute, shifted)
        return self._shardys(attribute)

    def _shifting(self, attribute: Any, dims: tuple[int, ...]) -> Rule:
        """The rule of a pad that shifts, which Shardy takes for an elementwise operation."""
        key = (attribute, dims)
        if key not in self._read:
            rule = self._shardys(attribute)
            moved = frozenset(f for dim in dims for f in rule.operands[0][dim])
            self._read[key] = replace(rule, permutation=rule.permutation | moved)
        return self._read[key]

    def _shardys(self, attribute: Any) -> Rule:
        if attribute not in self._read:
            rule = sdy.OpShardingRuleAttr(attribute)
            self._read[attribute] = Rule(
                sizes=tuple(rule.factor_sizes),
                operands=tuple(_dim_factors(t) for t in rule.operand_mappings),
                results=tuple(_dim_factors(t) for t in rule.result_mappings),
                reduction=frozenset(rule.reduction_factors),
                replicated=frozenset(rule.need_replication_factors),
                permutation=frozenset(rule.permutation_factors),
            )
        return self._read[attribute]


def own_rule(op: Any) -> Rule | None:
    """The rule of an operation that Shardy has none for, where it is registered or known here."""
    kernel = read_kernel(op)
    if kernel is not None:
        return kernel_rule(kernel)
    name = operation_name(op)
    if name in _REGISTERED:
        return _REGISTERED[name](op)
    if name == "chlo.top_k":
        return _top_k_rule(op)
    return _elementwise_rule(op) if name.startswith("chlo.") else None


def write_own_rule(op: Any, known: Rule | None) -> None:
    """Tells Shardy a rule that is not its own, so that it partitions as the compiler does.

    Args:
      op: an MLIR operation.
      known: its rule in the op graph; where there is none, its tensors stay whole.
    """
    rule = own_rule(op) if known is not None else _whole_rule(op)
    if rule is None:
        return
    operands, results = (
        [
            sdy.TensorMappingAttr.get([sdy.DimMappingAttr.get(list(dim)) for dim in dims])
            for dims in mappings
        ]
        for mappings in (rule.operands, rule.results)
    )
    op.attributes[RULE] = sdy.OpShardingRuleAttr.get(
        list(rule.sizes),
        operands,
        results,
        reduction_factors=sorted(rule.reduction),
        need_replication_factors=sorted(rule.replicated),
        permutation_factors=sorted(rule.permutation),
    )


def operation_name(op: Any) -> str:
    """The name of an operation; a custom call is told by its target."""
    target = target_of(op)
    return f"custom_call:{target}" if target else str(op.name)


def kernel_rule(info: KernelInfo) -> Rule:
    """The rule of a call of a kernel.

    Shardy takes no factor of size 1 beside others in a dimension (`k` heads in `g` groups of 1).
    """
    arrays = (*info.operands, *info.results)
    told = [[[f for f in dim if info.sizes[f] > 1] or dim[:1] for dim in dims] for dims in arrays]
    named = {factor for dims in told for dim in dims for factor in dim}
    factors = [factor for factor in info.factors if factor in named]
    index = {factor: i for i, factor in enumerate(factors)}
    mapped = [tuple(tuple(index[f] for f in dim) for dim in dims) for dims in told]
    return Rule(
        sizes=tuple(info.sizes[f] for f in factors),
        operands=tuple(mapped[: len(info.operands)]),
        results=tuple(mapped[len(info.operands) :]),
        reduction=frozenset(index[f] for f in info.reduction if f in named),
        replicated=frozenset(index[f] for f in info.whole if f in named),
    )


def _dim_factors(mapping: Any) -> DimFactors:
    tensor = sdy.TensorMappingAttr(mapping)
    return tuple(tuple(sdy.DimMappingAttr(d).factor_indices) for d in tensor.dim_mappings)


def _elementwise_rule(op: Any) -> Rule | None:
    """A rule for an operation whose operands and results all have one shape (or are scalars)."""
    types = [value.type for value in (*op.operands, *op.results)]
    if not all(isinstance(t, ir.RankedTensorType) for t in types):
        return None
    shapes = [tuple(t.shape) for t in types]
    full = max(shapes, key=len)
    if any(shape not in (full, ()) for shape in shapes):
        return None
    identity = tuple((i,) for i in range(len(full)))
    maps = [identity if shape else () for shape in shapes]
    split = len(op.operands)
    return Rule(full, tuple(maps[:split]), tuple(maps[split:]))


def _whole_rule(op: Any) -> Rule | None:
    """A rule for an operation that nothing is known of: no dimension may be sharded."""
    types = [value.type for value in (*op.operands, *op.results)]
    if not all(isinstance(t, ir.RankedTensorType) for t in types):
        return None
    sizes: list[int] = []
    maps: list[DimFactors] = []
    for type_ in types:
        maps.append(tuple((len(sizes) + i,) for i in range(type_.rank)))
        sizes += type_.shape
    split = len(op.operands)
    every = frozenset(range(len(sizes)))
    return Rule(tuple(sizes), tuple(maps[:split]), tuple(maps[split:]), replicated=every)


def _top_k_rule(op: Any) -> Rule:
    """Top-k along the last dimension of the operand, which stays whole; the others shard."""
    shape = tuple(op.operands[0].type.shape)
    chosen = op.results[0].type.shape[-1]
    last = len(shape) - 1
    batch = tuple((i,) for i in range(last))
    made = (*batch, (last + 1,))
    return Rule(
        sizes=(*shape, chosen),
        operands=((*batch, (last,)),),
        results=(made,) * len(op.results),
        replicated=frozenset({last, last + 1}),
    )
