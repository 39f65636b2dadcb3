"""A plan as logical axis rules, for Flax and for MaxText.

Logical rules map a name for a dimension ("embed") to mesh axes, for every tensor alike. A plan
chooses for each tensor by itself, so rules may not say all of it: what they get wrong is told.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from shardwright.cost_models.memory import dtype_bytes
from shardwright.errors import InputError
from shardwright.planner.export import spec_code
from shardwright.planner.plan_schema import PlanModel, Spec, TensorModel
from shardwright.planner.spec_patterns import match_specs

LogicalNames = Mapping[str, tuple[str | None, ...]]
"""Pattern of a path ("*" is any text) -> a name for each dimension, or None."""
Rule = tuple[str, tuple[str, ...]]


@dataclass(frozen=True)
class Deviation:
    """A tensor that the rules shard otherwise than the plan."""

    path: str
    ruled: Spec
    planned: Spec


@dataclass(frozen=True)
class LogicalRules:
    """Rules in the order in which they apply.

    Attributes:
      rules: logical name -> mesh axes; a name may come again for where its axes are taken.
      deviations: tensors that the rules get wrong, largest first.
      named: how many tensors have logical names.
      unnamed: the tensors without, of which the rules say nothing, largest first.
    """

    rules: tuple[Rule, ...]
    deviations: tuple[Deviation, ...]
    named: int
    unnamed: tuple[TensorModel, ...] = ()


def logical_rules(plan: PlanModel, names: LogicalNames) -> LogicalRules:
    """The rules that say most of a plan's bytes.

    For each logical name, the mesh axes that shard most bytes of the dimensions of that name; names
    that shard more bytes come first, since of two dimensions that want the same mesh axis the
    first rule wins.

    Raises:
      InputError: a pattern matches no tensor, or has another number of names than dimensions.
    """
    tensors = plan.program.inputs
    matched = match_specs(
        {p: tuple(n) for p, n in names.items()}, [t.path for t in tensors], "names"
    )
    weights: dict[str, dict[tuple[str, ...], float]] = defaultdict(lambda: defaultdict(float))
    named: list[tuple[int, tuple[str | None, ...]]] = []
    for index, (tensor, logical) in enumerate(zip(tensors, matched, strict=True)):
        if logical is None:
            continue
        if len(logical) != len(tensor.shape):
            raise InputError(
                f"{len(logical)} names for {len(tensor.shape)} dimensions",
                where=tensor.path,
                do="Give one name a dimension, None where it has none",
            )
        told = tuple(n if isinstance(n, str) else None for n in logical)
        named.append((index, told))
        size = prod(tensor.shape) * dtype_bytes(tensor.dtype)
        for name, axes in zip(told, tensor.spec, strict=True):
            if name is not None:
                weights[name][tuple(axes)] += size
    best = {name: max(axes, key=lambda a: axes[a]) for name, axes in weights.items()}
    order = sorted(best, key=lambda name: (not best[name], -weights[name][best[name]]))
    rules = [(name, best[name]) for name in order]
    # Other shardings of a name apply where the axes of its first rule are taken.
    for name in order:
        others = sorted(weights[name], key=lambda a: -weights[name][a])
        rules += [(name, axes) for axes in others if axes and axes != best[name]]
    deviations = []
    for index, logical in sorted(named, key=lambda n: -prod(tensors[n[0]].shape)):
        ruled = apply_rules(logical, rules)
        if ruled != tensors[index].spec:
            deviations.append(Deviation(tensors[index].path, ruled, tensors[index].spec))
    unnamed = [t for t, logical in zip(tensors, matched, strict=True) if logical is None]
    unnamed.sort(key=lambda t: -prod(t.shape))
    return LogicalRules(tuple(rules), tuple(deviations), len(named), tuple(unnamed))


def apply_rules(logical: Sequence[str | None], rules: Sequence[Rule]) -> Spec:
    """The sharding that rules give a tensor, as Flax and MaxText apply them.

    Rules are taken in order; each gives its mesh axes to the dimension of its name that has none
    yet, unless one of the axes is taken in this tensor.

    Source: documentation of `flax.linen.logical_to_mesh_axes`.
    """
    found: list[tuple[str, ...] | None] = [None] * len(logical)
    taken: set[str] = set()
    for name, axes in rules:
        if name in logical:
            place = list(logical).index(name)
            if found[place] is None and not taken & set(axes):
                found[place] = axes
                taken |= set(axes)
    return [list(axes or ()) for axes in found]


def flax_code(plan: PlanModel, found: LogicalRules) -> str:
    """Rules as Python for `flax.linen.logical_axis_rules`."""
    lines = [*_remarks(plan, found), "LOGICAL_AXIS_RULES = ("]
    lines += [f"    ({name!r}, {_axes(axes)})," for name, axes in found.rules]
    return "\n".join([*lines, ")", ""])


def _axes(axes: tuple[str, ...]) -> str:
    return "None" if not axes else repr(axes[0]) if len(axes) == 1 else repr(axes)


def maxtext_yaml(plan: PlanModel, found: LogicalRules) -> str:
    """Rules as the keys `mesh_axes` and `logical_axis_rules` of a MaxText configuration."""
    lines = _remarks(plan, found)
    lines.append(f"mesh_axes: [{', '.join(map(_quoted, plan.mesh_axes))}]")
    lines.append("logical_axis_rules: [")
    for name, axes in found.rules:
        lines.append(f"  [{_quoted(name)}, [{', '.join(map(_quoted, axes))}]],")
    return "\n".join([*lines, "]", ""])


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _remarks(plan: PlanModel, found: LogicalRules) -> list[str]:
    axes = ", ".join(f"{axis}={size}" for axis, size in plan.mesh_axes.items())
    wrong = len(found.deviations)
    lines = [
        f"# {plan.program.name} on {plan.topology}: mesh axes {axes}.",
        f"# {found.named - wrong} of {found.named} tensors are sharded by these rules as planned.",
    ]
    if found.unnamed:
        lines.append(
            f"# {len(found.unnamed)} more are left out, as their dimensions have no logical names "
            "(give them with --names); planned:"
        )
        lines += [f"#   {tensor.path}: {spec_code(tensor.spec)}" for tensor in found.unnamed]
    for deviation in found.deviations:
        lines.append(
            f"# otherwise than planned: {deviation.path}: {spec_code(deviation.ruled)}, planned "
            f"{spec_code(deviation.planned)}"
        )
    return lines
