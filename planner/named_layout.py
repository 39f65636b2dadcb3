"""Named layouts: a logical name of a dimension always maps to the same mesh axes.

Every logical name is a node of the sharding problem that chooses a set of mesh axes, and an
argument or result whose dimension has the name must shard that dimension over exactly these. What
runs between is free. A plan under this rule can be written as layout rules, as Mesh-TensorFlow,
Flax and MaxText take them.

Source: Shazeer et al., Mesh-TensorFlow (2018), section 3 (computation layout: a partial map from
  dimension names to mesh dimensions).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardwright.errors import InputError
from shardwright.planner.evaluation import Evaluation
from shardwright.planner.nodes import NodeGraph
from shardwright.planner.plan_schema import LayoutModel, LayoutRuleModel, TensorModel
from shardwright.planner.problem import FloatArray, ShardingProblem, Transfer
from shardwright.planner.program import Program, Tensor
from shardwright.planner.spec_patterns import match_specs
from shardwright.planner.strategies import IntArray

Names = tuple[str | None, ...]
LogicalAxes = Mapping[str, Names]
"""Pattern of a path ("*" is any text) -> a name for each dimension, or None."""


@dataclass(frozen=True)
class NamedLayout:
    """The logical names of a program's arguments and results; None where one has none."""

    inputs: tuple[Names | None, ...]
    outputs: tuple[Names | None, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Every name, in the order in which arguments have them."""
        found = (name for names in (*self.inputs, *self.outputs) for name in names or ())
        return tuple(dict.fromkeys(name for name in found if name is not None))


def named_layout(program: Program, logical_axes: LogicalAxes) -> NamedLayout:
    """The names of a program's arguments, and of its results where a path is alike.

    Raises:
      InputError: there are no names, a pattern matches no argument, or a tensor has another number
        of dimensions than its pattern has names.
    """
    if not logical_axes:
        raise InputError(
            "a named layout needs logical names of dimensions, and the arguments carry none",
            where="logical_axes",
            do='Give names by path, as in logical_axes={"*[\'w_up\']": ("embed", "mlp")}; Flax '
            "parameters with partitioning metadata carry their own",
        )
    patterns = {pattern: tuple(names) for pattern, names in logical_axes.items()}
    matched = match_specs(patterns, [t.path for t in program.inputs], "logical_axes")
    inputs = [_checked(t, names) for t, names in zip(program.inputs, matched, strict=True)]
    known = {t.path: names for t, names in zip(program.inputs, inputs, strict=True)}
    outputs = []
    for number, tensor in enumerate(program.outputs):
        source = program.aliases.get(number)
        names = known.get(tensor.path) if source is None else inputs[source]
        outputs.append(names if names and len(names) == len(tensor.shape) else None)
    return NamedLayout(tuple(inputs), tuple(outputs))


def _checked(tensor: Tensor, names: Sequence[object] | None) -> Names | None:
    if names is None:
        return None
    dimensions = len(tensor.shape) - tensor.inner_dims
    if len(names) != dimensions:
        raise InputError(
            f"{len(names)} names for {dimensions} dimensions",
            where=f"logical_axes {tensor.path}",
            do="Give one name a dimension, None where it has none",
        )
    return tuple(name if isinstance(name, str) else None for name in names)


def tie_names(problem: ShardingProblem, layout: NamedLayout) -> ShardingProblem:
    """The problem with a node for every name, which arguments and results must agree with."""
    axes = len(problem.mesh.shape)
    names = layout.names
    first = len(problem.strategies)
    number = {name: first + k for k, name in enumerate(names)}
    tables: dict[tuple[int, int], FloatArray] = {}
    for node, factor, name in _named_factors(problem.node_graph, layout):
        table = _agreement(problem.strategies[node], factor, axes)
        key = (number[name], node)
        tables[key] = tables[key] + table if key in tables else table
    rows = _subsets(axes)
    zeros = np.zeros(len(rows))
    alike = problem.alike
    if alike is not None:
        apart = max(alike, default=-1) + 1
        alike = (*alike, *range(apart, apart + len(names)))
    return replace(
        problem,
        strategies=(*problem.strategies, *[rows] * len(names)),
        compute=(*problem.compute, *[zeros] * len(names)),
        exposed=(*problem.exposed, *[zeros] * len(names)),
        loop_of=(*problem.loop_of, *[-1] * len(names)),
        transfers=(
            *problem.transfers,
            *(Transfer(a, b, None, table) for (a, b), table in tables.items()),
        ),
        layout_names=names,
        alike=alike,
    )


def _named_factors(nodes: NodeGraph, layout: NamedLayout) -> Iterator[tuple[int, int, str]]:
    """Node, factor and name of every named dimension that is larger than one."""
    graph = nodes.graph
    seen = set()
    for values, of, named in (
        (graph.arguments, nodes.argument_nodes, layout.inputs),
        (graph.results, nodes.result_nodes, layout.outputs),
    ):
        for value, node, names in zip(values, of, named, strict=True):
            for factors, name in zip(nodes.whole_dims(value), names or (), strict=False):
                if name is not None and factors and (node, factors[0]) not in seen:
                    seen.add((node, factors[0]))
                    yield node, factors[0], name


def _subsets(axes: int) -> IntArray:
    """Every set of mesh axes as a row, 0 where an axis is in it, else -1."""
    codes = np.arange(1 << axes, dtype=np.int64)
    return np.where(codes[:, None] >> np.arange(axes) & 1, 0, -1).astype(np.int64)


def _agreement(rows: IntArray, factor: int, axes: int) -> FloatArray:
    """0 where a strategy shards a factor over exactly a set of axes, else inf."""
    codes = ((rows == factor) << np.arange(axes)).sum(axis=1)
    sets = np.arange(1 << axes)
    return np.where(sets[:, None] == codes[None, :], 0.0, np.inf)


def layout_model(
    layout: NamedLayout,
    inputs: Sequence[TensorModel],
    outputs: Sequence[TensorModel],
    free: Evaluation,
) -> LayoutModel:
    """The rules of a plan under a named layout, and what the free plan takes.

    Args:
      inputs, outputs: of the plan.
      free: the best plan without the rule.
    """
    rules: dict[str, list[str]] = {}
    by_path = {}
    for tensors, named in ((inputs, layout.inputs), (outputs, layout.outputs)):
        for tensor, names in zip(tensors, named, strict=True):
            if names is None:
                continue
            by_path[tensor.path] = list(names)
            for name, axes, size in zip(names, tensor.spec, tensor.shape, strict=False):
                if name is not None and (size > 1 or name not in rules):
                    rules[name] = list(axes)
    ordered = sorted(rules, key=lambda name: not rules[name])
    return LayoutModel(
        rules=[LayoutRuleModel(name=name, axes=rules[name]) for name in ordered],
        names=by_path,
        free_step_time_s=free.step_s,
        free_peak_memory_bytes=free.peak.bytes,
    )
