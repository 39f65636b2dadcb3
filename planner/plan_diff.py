"""What changed between two plans, in order of seconds, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from shardwright.cost_models.memory import dtype_bytes
from shardwright.planner.plan_schema import EstimateModel, PlanModel, Spec, TensorModel
from shardwright.planner.spec_patterns import spec_text

_SAME = 1e-9
"""Seconds below which a difference is none."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Quantity(_Model):
    """A number in both plans."""

    a: float
    b: float

    @property
    def change(self) -> float:
        """What b has more."""
        return self.b - self.a


class CostChange(_Model):
    """Seconds of one step that differ.

    Attributes:
      kind: "compute", or what the collective is.
      axes: of a collective, with their sizes: "x=16".
      op, source: near which operation and source line.
      shape: "bf16[8, 128]" of a collective.
      ahead: an all-gather that runs ahead of its use, beside compute that may hide it.
      status: in the second plan only, in the first only, or in both with other seconds.
    """

    kind: str
    axes: list[str]
    op: str
    source: str
    shape: str
    ahead: bool
    seconds: Quantity
    status: Literal["gained", "lost", "changed"]


class TensorChange(_Model):
    """Inputs or outputs that differ: alike ones told once.

    Attributes:
      path: of the first of them.
      count: how many they are.
      a, b: the sharding in each plan, axes with sizes; None where it is not in the plan.
      device_bytes: bytes on one device of all of them.
    """

    path: str
    role: Literal["input", "output"]
    count: int
    type_a: str | None
    type_b: str | None
    a: Spec | None
    b: Spec | None
    device_bytes: Quantity


class PlanDiff(_Model):
    """What changed from plan a to plan b.

    Attributes:
      reasons: why, in words; empty where both were asked the same.
      mesh: axis -> size of each plan.
      costs: compute by source line and collectives, most changed seconds first.
      tensors: shardings, most bytes on a device first.
    """

    name_a: str
    name_b: str
    topology_a: str
    topology_b: str
    reasons: list[str]
    mesh_a: dict[str, int]
    mesh_b: dict[str, int]
    step_time_s: Quantity
    compute_time_s: Quantity
    collective_time_s: Quantity
    exposed_collective_time_s: Quantity
    peak_memory_bytes: Quantity
    mfu: Quantity
    costs: list[CostChange] = Field(description="most changed seconds first")
    tensors: list[TensorChange]

    @property
    def same(self) -> bool:
        """Whether the plans shard and cost the same."""
        return not self.costs and not self.tensors and self.mesh_a == self.mesh_b


def diff_plans(a: PlanModel, b: PlanModel) -> PlanDiff:
    """Compares two plans."""

    def both(measure: Callable[[EstimateModel], float]) -> Quantity:
        return Quantity(a=measure(a.estimate), b=measure(b.estimate))

    return PlanDiff(
        name_a=a.program.name,
        name_b=b.program.name,
        topology_a=a.topology,
        topology_b=b.topology,
        reasons=reasons(a, b),
        mesh_a=dict(a.mesh_axes),
        mesh_b=dict(b.mesh_axes),
        step_time_s=both(lambda e: e.step_time_s),
        compute_time_s=both(lambda e: e.compute_time_s),
        collective_time_s=both(lambda e: e.collective_time_s),
        exposed_collective_time_s=both(lambda e: e.exposed_collective_time_s),
        peak_memory_bytes=both(lambda e: e.peak_memory_bytes),
        mfu=both(lambda e: e.mfu),
        costs=cost_changes(a.estimate, b.estimate, a.mesh_axes, b.mesh_axes),
        tensors=_tensor_changes(a, b),
    )


def reasons(a: PlanModel, b: PlanModel) -> list[str]:
    """Why two plans may differ: what they were made from."""
    found = []
    if a.program.fingerprint != b.program.fingerprint:
        found.append("the program")
    if a.topology != b.topology:
        found.append(f"the slice: {a.topology} -> {b.topology}")
    elif fields := _differing(a.chip, b.chip):
        found.append(f"the hardware profile: {', '.join(fields)}")
    options_a, options_b = (p.options.model_dump(exclude={"topology"}) for p in (a, b))
    found += [
        _option(key, options_a[key], options_b[key]) for key in _differing(options_a, options_b)
    ]
    versions_a, versions_b = a.versions.model_dump(), b.versions.model_dump()
    found += [
        f"the version of {key}: {versions_a[key]} -> {versions_b[key]}"
        for key in _differing(versions_a, versions_b)
    ]
    return found


def _option(key: str, a: Any, b: Any) -> str:
    """An option of two plans; of pins those that differ, in short form."""
    if key != "pinned":
        return f"the option {key}: {a} -> {b}"
    keys = _differing(a, b)
    before, after = (
        ", ".join(f"{key} as {spec_text(pins[key])}" for key in keys if key in pins) or "none"
        for pins in (a, b)
    )
    return f"the option pinned: {before} -> {after}"


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    return [key for key in dict.fromkeys((*a, *b)) if a.get(key) != b.get(key)]


def cost_changes(
    a: EstimateModel,
    b: EstimateModel,
    sizes_a: Mapping[str, int],
    sizes_b: Mapping[str, int],
) -> list[CostChange]:
    """Compute by source line and collectives that differ, most changed seconds first.

    Args:
      sizes_a, sizes_b: mesh axis -> size of each plan; axes are the same when both agree.
    """
    costs_a, costs_b = _costs(a, sizes_a), _costs(b, sizes_b)
    found = []
    for key in dict.fromkeys((*costs_a, *costs_b)):
        seconds = Quantity(a=costs_a.get(key, 0.0), b=costs_b.get(key, 0.0))
        if abs(seconds.change) <= _SAME:
            continue
        kind, axes, op, source, shape, ahead = key
        status: Literal["gained", "lost", "changed"] = "changed"
        if key not in costs_a:
            status = "gained"
        elif key not in costs_b:
            status = "lost"
        found.append(
            CostChange(
                kind=kind,
                axes=list(axes),
                op=op,
                source=source,
                shape=shape,
                ahead=ahead,
                seconds=seconds,
                status=status,
            )
        )
    return sorted(found, key=lambda change: -abs(change.seconds.change))


_Key = tuple[str, tuple[str, ...], str, str, str, bool]


def _costs(estimate: EstimateModel, sizes: Mapping[str, int]) -> dict[_Key, float]:
    """Seconds of one step by what they are for; what lines are not told of compute is one more."""
    found: dict[_Key, float] = {}
    told = 0.0
    for line in estimate.compute:
        key: _Key = ("compute", (), line.op, line.source, "", False)
        found[key] = found.get(key, 0.0) + line.seconds
        told += line.seconds
    rest = estimate.compute_time_s - told
    if rest > _SAME:
        found["compute", (), "", "", "", False] = rest
    for one in estimate.collectives:
        axes = tuple(f"{axis}={sizes[axis]}" for axis in one.axes)
        kind, shape = one.kind.replace("_", "-"), f"{one.dtype}{one.shape}"
        key = (kind, axes, one.op, one.source, shape, one.can_hide)
        found[key] = found.get(key, 0.0) + one.seconds * one.count
    return found


def _tensor_changes(a: PlanModel, b: PlanModel) -> list[TensorChange]:
    alike: dict[tuple[object, ...], list[TensorChange]] = {}
    kept_a, kept_b = ({output for output, _ in plan.program.aliases} for plan in (a, b))
    outputs_a, outputs_b = (
        [t for i, t in enumerate(plan.program.outputs) if i not in kept]
        for plan, kept in ((a, kept_a), (b, kept_b))
    )
    roles: tuple[tuple[Literal["input", "output"], Any, Any], ...] = (
        ("input", a.program.inputs, b.program.inputs),
        ("output", outputs_a, outputs_b),
    )
    for role, tensors_a, tensors_b in roles:
        by_path_a = {t.path: t for t in tensors_a}
        by_path_b = {t.path: t for t in tensors_b}
        for path in dict.fromkeys((*by_path_a, *by_path_b)):
            change = _tensor_change(role, path, by_path_a.get(path), by_path_b.get(path), a, b)
            if change is not None:
                key = (role, change.type_a, change.type_b, str(change.a), str(change.b))
                alike.setdefault(key, []).append(change)
    merged = [_merged(group) for group in alike.values()]
    return sorted(merged, key=lambda c: -max(c.device_bytes.a, c.device_bytes.b))


def _tensor_change(
    role: Literal["input", "output"],
    path: str,
    before: TensorModel | None,
    after: TensorModel | None,
    a: PlanModel,
    b: PlanModel,
) -> TensorChange | None:
    type_a, spec_a, bytes_a = _told(before, a.mesh_axes)
    type_b, spec_b, bytes_b = _told(after, b.mesh_axes)
    if (type_a, spec_a) == (type_b, spec_b):
        return None
    return TensorChange(
        path=path,
        role=role,
        count=1,
        type_a=type_a,
        type_b=type_b,
        a=spec_a,
        b=spec_b,
        device_bytes=Quantity(a=bytes_a, b=bytes_b),
    )


def _told(
    tensor: TensorModel | None, sizes: Mapping[str, int]
) -> tuple[str | None, Spec | None, float]:
    if tensor is None:
        return None, None, 0.0
    parts = prod(sizes[axis] for dim in tensor.spec for axis in dim)
    nbytes = prod(tensor.shape) * dtype_bytes(tensor.dtype) / parts
    spec = [[f"{axis}={sizes[axis]}" for axis in dim] for dim in tensor.spec]
    return f"{tensor.dtype}{tensor.shape}", spec, nbytes


def _merged(group: Sequence[TensorChange]) -> TensorChange:
    nbytes = Quantity(
        a=sum(c.device_bytes.a for c in group), b=sum(c.device_bytes.b for c in group)
    )
    return group[0].model_copy(update={"count": len(group), "device_bytes": nbytes})
