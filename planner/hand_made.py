"""Price a sharding that a person wrote, by the same measure as plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from shardwright.errors import InputError
from shardwright.hardware_profiles.chip import ChipProfile
from shardwright.hardware_profiles.mesh import LogicalMesh, meshes_for_shape
from shardwright.hardware_profiles.slices import parse_slice
from shardwright.planner.collectives import DimAxes
from shardwright.planner.evaluation import Evaluation, evaluate_partitioned
from shardwright.planner.partitioning import partition
from shardwright.planner.pins import dim_axes_of
from shardwright.planner.plan_making import estimate_model
from shardwright.planner.plan_schema import EstimateModel
from shardwright.planner.prepared import Prepared, prepare
from shardwright.planner.program import Program, Tensor
from shardwright.planner.requests import EvaluateRequest, checked
from shardwright.planner.tracing import in_mesh


def evaluate(
    fn: Callable[..., Any] | Program,
    *args: Any,
    topology: str,
    mesh: Mapping[str, int],
    in_specs: Any,
    out_specs: Any = None,
    donate_argnums: int | Sequence[int] = (),
    model_flops: float | None = None,
    chip: ChipProfile | None = None,
) -> EstimateModel:
    """What a hand-made sharding costs, on the best layout of its mesh on the slice.

    Args:
      fn: a function of `args`, with `with_sharding_constraint` inside as one likes, or a `Program`.
      topology: a slice, as for `plan`.
      mesh: axis name -> size.
      in_specs: PartitionSpecs of the arguments: a pytree of the arguments' structure or a prefix
        of it. For a `Program` without pytrees, a list with one for each input.
      out_specs: the same for the results; where None, donated arguments' results keep their
        sharding and the partitioner chooses the rest.
      donate_argnums, model_flops, chip: as for `plan`.

    Raises:
      InputError: the slice, the function, the mesh or a spec is wrong.
    """
    mesh = checked(
        EvaluateRequest,
        "evaluate",
        topology=topology,
        mesh=mesh,
        donate_argnums=donate_argnums,
        model_flops=model_flops,
        chip=chip,
    ).mesh
    on = parse_slice(topology, chip)
    meshes = meshes_for_shape(on, mesh)
    if isinstance(fn, Program):
        program = fn
    else:
        program = in_mesh(mesh, lambda: Program.trace(fn, *args, donate_argnums=donate_argnums))
    ins = flat_shardings(in_specs, program.in_tree, program.inputs, mesh, "in_specs")
    outs = _result_shardings(program, out_specs, ins, mesh)
    prepared = prepare(program)
    best = min(
        (_evaluate_on(prepared, layout, ins, outs) for layout in meshes),
        key=lambda evaluation: evaluation.step_s,
    )
    return estimate_model(prepared, best, on, model_flops)


def _evaluate_on(
    prepared: Prepared,
    mesh: LogicalMesh,
    ins: Sequence[DimAxes | None],
    outs: Sequence[DimAxes | None],
) -> Evaluation:
    partitioned = partition(
        prepared.program,
        prepared.graph,
        mesh.shape,
        in_shardings=ins,
        out_shardings=outs,
    )
    return evaluate_partitioned(
        prepared.graph, prepared.fusions, prepared.buffers, partitioned, mesh
    )


def _result_shardings(
    program: Program,
    out_specs: Any,
    ins: Sequence[DimAxes],
    mesh: Mapping[str, int],
) -> Sequence[DimAxes | None]:
    if out_specs is not None:
        return flat_shardings(out_specs, program.out_tree, program.outputs, mesh, "out_specs")
    kept = {o: ins[i] for o, i in program.aliases.items()}
    return [kept.get(k) for k in range(len(program.outputs))]


def flat_shardings(
    specs: Any, tree: Any, tensors: Sequence[Tensor], mesh: Mapping[str, int], where: str
) -> list[DimAxes]:
    """The sharding of each array, from PartitionSpecs as `evaluate` takes them.

    Args:
      specs: PartitionSpecs in a prefix of the pytree, or a list of them where there is none.
      tree: the pytree of the arrays, or None.
      where: what to call the specs in errors.

    Raises:
      InputError: they are not a prefix, or one does not suit its array or the mesh.
    """

    def is_spec(leaf: Any) -> bool:
        return leaf is None or isinstance(leaf, PartitionSpec)

    if tree is None:
        flat = list(specs)
    else:
        full = tree.unflatten(range(tree.num_leaves))
        try:
            flat = jax.tree_util.tree_leaves(
                jax.tree_util.tree_map(
                    lambda spec, part: jax.tree_util.tree_map(lambda _: spec, part),
                    specs,
                    full,
                    is_leaf=is_spec,
                ),
                is_leaf=is_spec,
            )
        except ValueError as error:
            raise InputError(
                f"the specs are not a prefix of the pytree: {str(error).splitlines()[0]}",
                where=where,
                do="Give one PartitionSpec for each array, or one for a whole subtree",
            ) from None
    if len(flat) != len(tensors):
        raise InputError(
            f"{len(flat)} specs for {len(tensors)} arrays",
            where=where,
            do="Give one PartitionSpec for each array",
        )
    for spec, tensor in zip(flat, tensors, strict=True):
        if not is_spec(spec):
            raise InputError(
                f"{spec!r} is not a PartitionSpec",
                where=f"{where} {tensor.path}",
                do='Write jax.sharding.PartitionSpec("data", None), or None to replicate',
            )
    return [
        dim_axes_of(spec or PartitionSpec(), tensor, mesh, f"{where} {tensor.path}")
        for spec, tensor in zip(flat, tensors, strict=True)
    ]
