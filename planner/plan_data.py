"""Plan data and what the planner works with: one as the other."""

from __future__ import annotations

import base64
from typing import Any

import jax
from jax.sharding import PartitionSpec

from shardwright.hardware_profiles.chip import parse_chip
from shardwright.hardware_profiles.mesh import AxisRef, LogicalMesh
from shardwright.planner.collectives import DimAxes
from shardwright.planner.constraints import Demand, Site, ValueConstraint
from shardwright.planner.graph import OpKey
from shardwright.planner.kernel_shardings import KernelShardings
from shardwright.planner.plan_schema import (
    ConstraintModel,
    DemandModel,
    KernelModel,
    PlanModel,
    SiteModel,
    Spec,
)


def partition_spec(spec: Spec) -> PartitionSpec:
    """A sharding from plan data as JAX writes it, without trailing None."""
    entries = [None if not axes else axes[0] if len(axes) == 1 else tuple(axes) for axes in spec]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def spec_of(sharding: DimAxes) -> Spec:
    """A sharding as plan data."""
    return [[axis.name for axis in dim] for dim in sharding]


def dim_axes(spec: Spec) -> DimAxes:
    """A sharding from plan data."""
    return tuple(tuple(AxisRef(name) for name in dim) for dim in spec)


def constraint_model(constraint: ValueConstraint) -> ConstraintModel:
    """A constraint as plan data."""
    return ConstraintModel(
        site=_site_model(constraint.site),
        made=spec_of(constraint.made),
        given=None if constraint.copy is None else spec_of(constraint.copy),
        demands=[
            DemandModel(
                site=_site_model(d.site), spec=None if d.sharding is None else spec_of(d.sharding)
            )
            for d in constraint.demands
        ],
        source=constraint.source,
    )


def value_constraint(model: ConstraintModel) -> ValueConstraint:
    """A constraint from plan data."""
    return ValueConstraint(
        site=_site(model.site),
        made=dim_axes(model.made),
        copy=None if model.given is None else dim_axes(model.given),
        demands=tuple(
            Demand(_site(d.site), None if d.spec is None else dim_axes(d.spec))
            for d in model.demands
        ),
        source=model.source,
    )


def kernel_model(kernel: KernelShardings) -> KernelModel:
    """The shardings of a kernel's call as plan data."""
    return KernelModel(
        site=_site_model(Site("result", 0, kernel.key)),
        name=kernel.name,
        in_specs=[spec_of(s) for s in kernel.operands],
        out_specs=[spec_of(s) for s in kernel.results],
        summed=list(kernel.summed),
        source=kernel.source,
    )


def _site_model(site: Site) -> SiteModel:
    if site.key is None:
        return SiteModel(kind=site.kind, index=site.index)  # type: ignore[arg-type]
    return SiteModel(
        kind=site.kind,  # type: ignore[arg-type]
        index=site.index,
        location=site.key.location,
        op=site.key.op,
        ordinal=site.key.ordinal,
        branch=site.branch,
    )


def _site(model: SiteModel) -> Site:
    key = None if model.op is None else op_key(model)
    return Site(model.kind, model.index, key, model.branch)


def op_key(model: SiteModel) -> OpKey:
    """The operation at a site of plan data."""
    return OpKey(model.location or "", model.op or "", model.ordinal)


def tree_text(tree: Any) -> str | None:
    """A pytree structure as text, or None for containers that jax cannot serialise."""
    if tree is None:
        return None
    try:
        return base64.b64encode(tree.serialize_using_proto()).decode()
    except ValueError:
        return None


def tree_of(text: str | None) -> Any:
    """The inverse of `tree_text`."""
    if text is None:
        return None
    registry = jax.tree_util.default_registry
    return jax.tree_util.PyTreeDef.deserialize_using_proto(
        registry, base64.b64decode(text, validate=True)
    )


def damage(data: PlanModel) -> str:
    """What in a plan does not go together, or ""."""
    program = data.program
    trees = {"in_tree": program.inputs, "out_tree": program.outputs}
    for name, tensors in trees.items():
        try:
            tree = tree_of(getattr(program, name))
        except Exception as error:  # base64 and jax raise several types for broken text
            return f"program.{name}: {error}"
        if tree is not None and tree.num_leaves != len(tensors):
            return f"program.{name}: {tree.num_leaves} leaves for {len(tensors)} arrays"
    mesh = LogicalMesh.from_json(data.mesh, parse_chip(data.chip))
    if mesh.shape != data.mesh_axes:
        return "mesh_axes: they are not those of mesh"
    if mesh.slice.name != data.topology:
        return f"topology: the mesh is laid on {mesh.slice.name}"
    for t in (*program.inputs, *program.outputs):
        if len(t.spec) != len(t.shape):
            return f"{t.path}: {len(t.spec)} entries of a sharding for {len(t.shape)} dimensions"
    specs = [t.spec for t in (*program.inputs, *program.outputs)]
    for c in data.constraints:
        specs += [c.made, c.given or [], *(d.spec or [] for d in c.demands)]
    for k in data.kernels:
        specs += [*k.in_specs, *k.out_specs, [k.summed]]
    named = {axis for spec in specs for dim in spec for axis in dim}
    if unknown := named - data.mesh_axes.keys():
        return f"a spec that names {', '.join(sorted(unknown))}, which the mesh does not have"
    return ""
