"""Why a tensor is sharded as it is: every alternative, priced.

Each alternative is priced twice by the exact evaluation, as plans are: with every other sharding
of the plan kept (the tensor is resharded wherever it is read as the plan reads it), and, for the
most promising, with everything else planned again around it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from shardwright.errors import DoesNotFitError, InputError
from shardwright.planner.collectives import DimAxes
from shardwright.planner.constraints import Demand, Site, ValueConstraint
from shardwright.planner.evaluation import Evaluation, evaluate_partitioned
from shardwright.planner.explain_targets import Target, find_targets
from shardwright.planner.fixed import fixed_strategies
from shardwright.planner.partitioning import partition
from shardwright.planner.pins import Pin, resolved_pins
from shardwright.planner.plan_diff import CostChange, cost_changes
from shardwright.planner.plan_schema import Spec
from shardwright.planner.prepared import Prepared, prepare
from shardwright.planner.program import Program
from shardwright.planner.search import search_meshes
from shardwright.planner.spec_patterns import spec_text

if TYPE_CHECKING:
    from shardwright.hardware_profiles.mesh import LogicalMesh
    from shardwright.planner.fixed import FixedStrategies
    from shardwright.planner.plan import Plan

_MOST_ALTERNATIVES = 32


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Price(_Model):
    """One alternative, priced.

    Attributes:
      step_time_s: seconds of one step.
      more_s: than the plan takes; negative where it is faster.
      compute_s, communication_s: of that, compute and exposed communication.
      peak_memory_bytes: on one device.
      fits: within the memory that the plan was given.
      changes: where the seconds differ from the plan, most first.
      moved: how many other inputs and outputs are sharded otherwise than in the plan.
    """

    step_time_s: float
    more_s: float
    compute_s: float
    communication_s: float
    peak_memory_bytes: float
    fits: bool
    changes: list[CostChange]
    moved: int


class Alternative(_Model):
    """One sharding of the tensor.

    Attributes:
      fixed: priced with the rest of the plan kept; None where the partitioner refuses it.
      resolved: with the rest planned again; None where that was not tried or nothing fits.
      note: what else is to know.
    """

    spec: Spec
    fixed: Price | None
    resolved: Price | None
    note: str = ""


class Explanation(_Model):
    """Why one tensor is sharded as it is."""

    name: str = Field(description="the path of an argument, or an operation and its source line")
    type: str
    also: list[str] = Field(description="others that the same name matches")
    mesh_axes: dict[str, int]
    spec: Spec = Field(description="as planned")
    pinned: str = Field(default="", description="the pins that fix it, or nothing")
    step_time_s: float
    alternatives: list[Alternative] = Field(description="fastest first, the plan's own left out")
    left_out: int = Field(description="alternatives beyond those that were priced")


def explain(
    plan: Plan,
    name: str,
    program: Program,
    *,
    resolve: int = 3,
    time_limit_s: float = 4.0,
) -> Explanation:
    """Prices the alternatives for one tensor of a plan.

    Args:
      name: the path of an argument ("[0]['params']['w1']"), its end in short ("params/w1"), or an
        operation's source line ("train.py:33", or "train.py:33#2" for the second there).
      program: the one that was planned.
      resolve: how many alternatives, the best with the rest kept, are planned again around.
      time_limit_s: seconds for each of these.

    Raises:
      InputError: nothing has such a name, or it is another program.
    """
    data = plan.data
    if program.fingerprint != data.program.fingerprint:
        raise InputError(
            "this is not the program that was planned",
            where=program.name,
            do="Give the same function, arguments and options as for the plan",
        )
    constraints = plan.constraints()
    targets = find_targets(name, data, constraints)
    target = targets[0]
    bench = _Bench(plan, program, prepare(program))
    planned = bench.price(constraints, bench.ins, bench.outs)
    if planned is None:
        raise InputError("the plan does not apply to the program", where=name, do="Plan again")
    bench.base = planned
    shape = bench.shape(target)
    sharding = bench.sharding(target)
    candidates = sorted(
        (s for s in _shardings(shape, data.mesh_axes, target.index is None) if s != sharding),
        key=lambda other: _moves(sharding, other),
    )
    priced = [
        (other, bench.fixed_price(target, other)) for other in candidates[:_MOST_ALTERNATIVES]
    ]
    priced.sort(key=lambda item: float("inf") if item[1] is None else item[1].step_time_s)
    alternatives = []
    for rank, (other, price) in enumerate(priced):
        resolved, note = None, ""
        if rank < resolve:
            resolved, note = bench.resolved_price(target, other, time_limit_s)
            if price is not None and price.fits and _slower(resolved, price):
                # Keeping the rest is one of the choices of planning again.
                resolved, note = price, ""
        alternatives.append(
            Alternative(spec=_spec(other), fixed=price, resolved=resolved, note=note)
        )
    return Explanation(
        name=target.name,
        type=bench.type(target),
        also=[other.name for other in targets[1:]],
        mesh_axes=dict(data.mesh_axes),
        spec=_spec(sharding),
        pinned=bench.pins_of(target),
        step_time_s=planned.step_s,
        alternatives=alternatives,
        left_out=max(0, len(candidates) - _MOST_ALTERNATIVES),
    )


def _slower(price: Price | None, than: Price) -> bool:
    return price is None or price.step_time_s > than.step_time_s


def _shardings(shape: Sequence[int], axes: Mapping[str, int], uneven: bool) -> Iterator[DimAxes]:
    """Every assignment of mesh axes to dimensions that divides (or, uneven, does not exceed)."""
    from shardwright.hardware_profiles.mesh import AxisRef

    places = [None, *(d for d, size in enumerate(shape) if size > 1)]
    for assigned in product(places, repeat=len(axes)):
        dims = tuple(
            tuple(AxisRef(axis) for axis, place in zip(axes, assigned, strict=True) if place == d)
            for d in range(len(shape))
        )
        parts = [prod(axes[axis.name] for axis in dim) for dim in dims]
        if all(
            size % n == 0 or (uneven and n <= size) for size, n in zip(shape, parts, strict=True)
        ):
            yield dims


def _moves(a: DimAxes, b: DimAxes) -> int:
    """How many axes are somewhere else."""
    places_a, places_b = (
        {axis.name: d for d, dim in enumerate(dims) for axis in dim} for dims in (a, b)
    )
    return sum(places_a.get(n) != places_b.get(n) for n in places_a.keys() | places_b.keys())


class _Bench:
    """A plan on its program, where alternatives are priced."""

    def __init__(self, plan: Plan, program: Program, prepared: Prepared) -> None:
        from shardwright.planner.plan_data import dim_axes

        self._plan = plan
        self._data = plan.data
        self._program = program
        self._prepared = prepared
        self._mesh: LogicalMesh = plan.logical_mesh
        self._limit = self._data.estimate.memory_capacity_bytes * (
            self._data.options.memory_fraction
        )
        self.constraints = plan.constraints()
        self.ins: list[DimAxes] = [dim_axes(t.spec) for t in self._data.program.inputs]
        self.outs: list[DimAxes] = [dim_axes(t.spec) for t in self._data.program.outputs]
        self.base: Evaluation | None = None

    # -- what the target is --------------------------------------------------------------------

    def _value(self, target: Target) -> int:
        graph = self._prepared.graph
        if target.index is not None:
            return graph.arguments[target.index]
        site = self.constraints[target.place or 0].site
        (op,) = [op for op in graph.ops if op.key == site.key]
        return op.results[site.index]

    def shape(self, target: Target) -> tuple[int, ...]:
        """Of the target."""
        return tuple(self._prepared.graph.values[self._value(target)].shape)

    def type(self, target: Target) -> str:
        """Element type and shape of the target."""
        value = self._prepared.graph.values[self._value(target)]
        return f"{value.dtype}{list(value.shape)}"

    def sharding(self, target: Target) -> DimAxes:
        """Of the target in the plan."""
        if target.index is not None:
            return self.ins[target.index]
        return self.constraints[target.place or 0].made

    def pins_of(self, target: Target) -> str:
        """The pins that fix the target."""
        node = self._prepared.nodes.producers[self._value(target)].node
        return ", ".join(
            f"{pin.name} as {spec_text(pin.spec)}"
            for pin in self._pins()
            if any(port.node == node for port in pin.ports)
        )

    def _pins(self) -> tuple[Pin, ...]:
        pinned = {name: tuple(map(tuple, spec)) for name, spec in self._data.options.pinned.items()}
        return resolved_pins(self._program, self._prepared.nodes, pinned)

    # -- prices --------------------------------------------------------------------------------

    def price(
        self,
        constraints: Sequence[ValueConstraint],
        ins: Sequence[DimAxes],
        outs: Sequence[DimAxes],
    ) -> Evaluation | None:
        """What shardings cost; None where the partitioner refuses them."""
        prepared = self._prepared
        try:
            partitioned = partition(
                self._program, prepared.graph, self._mesh.shape, constraints, ins, outs
            )
        except InputError:
            return None
        return evaluate_partitioned(
            prepared.graph, prepared.fusions, prepared.buffers, partitioned, self._mesh
        )

    def fixed_price(self, target: Target, sharding: DimAxes) -> Price | None:
        """With the rest of the plan kept."""
        ins, outs = list(self.ins), list(self.outs)
        constraints = list(self.constraints)
        owned: set[int] = set()
        if target.index is not None:
            owned = {o for o, i in self._program.aliases.items() if i == target.index}
            ins[target.index] = sharding
            for output in owned:
                outs[output] = sharding
        if target.place is not None:
            constraints[target.place] = _made(constraints[target.place], sharding)
        constraints = [_returned(c, owned, sharding) for c in constraints]
        if target.index is None:
            key = self.constraints[target.place or 0].site.key
            constraints = [_freed(c, key) for c in constraints]
        evaluation = self.price(constraints, ins, outs)
        return None if evaluation is None else self._told(evaluation, 0)

    def resolved_price(
        self, target: Target, sharding: DimAxes, time_limit_s: float
    ) -> tuple[Price | None, str]:
        """With everything else planned again on the same mesh, and a note where nothing fits."""
        options = self._data.options
        try:
            found = search_meshes(
                self._prepared,
                [self._mesh],
                self._limit,
                fixed_on=lambda mesh: self._fixed(target, sharding, mesh),
                time_limit_s=time_limit_s,
                seed=options.seed,
                on_progress=lambda progress: None,
            )
        except DoesNotFitError:
            return None, "with the rest planned again, nothing fits in memory"
        best = found.best
        now = [*best.in_shardings, *best.out_shardings]
        kept = [*self.ins, *self.outs]
        mine = set()
        if target.index is not None:
            mine = {target.index} | {
                len(self.ins) + o for o, i in self._program.aliases.items() if i == target.index
            }
        moved = sum(a != b for i, (a, b) in enumerate(zip(now, kept, strict=True)) if i not in mine)
        return self._told(best.evaluation, moved), ""

    def _fixed(self, target: Target, sharding: DimAxes, mesh: LogicalMesh) -> FixedStrategies:
        nodes = self._prepared.nodes
        port = nodes.producers[self._value(target)]
        # What is asked about takes the place of what pins it.
        kept = [p for p in self._pins() if all(one.node != port.node for one in p.ports)]
        asked = tuple(tuple(axis.name for axis in dim) for dim in sharding)
        return fixed_strategies(nodes, [*kept, Pin(target.name, asked, (port,))], mesh)

    def _told(self, evaluation: Evaluation, moved: int) -> Price:
        from shardwright.planner.plan_making import estimate_model

        base = self.base or evaluation
        on, sizes = self._mesh.slice, self._mesh.shape
        before = estimate_model(self._prepared, base, on, None)
        after = estimate_model(self._prepared, evaluation, on, None)
        return Price(
            step_time_s=evaluation.step_s,
            more_s=evaluation.step_s - base.step_s,
            compute_s=evaluation.compute_s - base.compute_s,
            communication_s=evaluation.exposed_collective_s - base.exposed_collective_s,
            peak_memory_bytes=evaluation.peak.bytes,
            fits=evaluation.peak.bytes <= self._limit,
            changes=cost_changes(before, after, sizes, sizes),
            moved=moved,
        )


def _made(constraint: ValueConstraint, sharding: DimAxes) -> ValueConstraint:
    """A value made otherwise, and read by everyone as before."""
    given = constraint.made if constraint.copy is None else constraint.copy
    demands = tuple(
        replace(d, sharding=given if d.sharding is None else d.sharding) for d in constraint.demands
    )
    if constraint.copy is not None:
        return replace(constraint, made=sharding)
    return replace(constraint, made=sharding, demands=demands)


def _returned(constraint: ValueConstraint, outputs: set[int], sharding: DimAxes) -> ValueConstraint:
    """A value that is returned as one of these results, returned in this sharding."""
    demands = tuple(
        Demand(d.site, sharding) if _is_return(d.site, outputs) else d for d in constraint.demands
    )
    return replace(constraint, demands=demands)


def _is_return(site: Site, outputs: set[int]) -> bool:
    return site.kind == "return" and site.index in outputs


def _freed(constraint: ValueConstraint, key: object) -> ValueConstraint:
    """Without the demands of one operation, so that it reads as its result needs."""
    demands = tuple(d for d in constraint.demands if d.site.kind != "operand" or d.site.key != key)
    return replace(constraint, demands=demands)


def _spec(sharding: DimAxes) -> Spec:
    return [[axis.name for axis in dim] for dim in sharding]
