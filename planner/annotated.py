"""A program with its plan put on it: StableHLO that JAX's compiler takes as it is."""

from __future__ import annotations

from math import prod

from shardwright.errors import InputError
from shardwright.planner import mlir
from shardwright.planner.annotate import annotate
from shardwright.planner.kernel_lowering import place_kernels
from shardwright.planner.mlir import ir
from shardwright.planner.plan import Plan
from shardwright.planner.plan_data import dim_axes
from shardwright.planner.prints import erase_prints
from shardwright.planner.program import Program


def annotated_stablehlo(
    program: Program, plan: Plan, platform: str = "tpu", *, keep_unknown: bool = True
) -> str:
    """The text of a program's module with the plan's shardings on it.

    Arguments and results of main have `sdy.sharding`, values inside `sdy.sharding_constraint`, and
    the module says for how many devices it is. It computes what the program did. Kernels are
    `shard_map` regions for the platform; those whose functions are not here, as the program is from
    a file, stay as they are where `keep_unknown` allows it. Prints are left out: only JAX lowers
    them.

    Raises:
      InputError: the plan is of another program, or a kernel's function is not here.
    """
    if plan.data.program.fingerprint != program.fingerprint:
        raise InputError(
            "the plan is of another program",
            where="annotation",
            do="Give the program that was planned",
        )
    with program.module() as module:
        annotate(
            module,
            plan.mesh_axes,
            plan.constraints(),
            [dim_axes(tensor.spec) for tensor in plan.data.program.inputs],
            [dim_axes(tensor.spec) for tensor in plan.data.program.outputs],
        )
        place_kernels(
            module,
            program.kernel_calls,
            plan.kernels(),
            plan.mesh_axes,
            platform,
            keep_unknown=keep_unknown,
        )
        erase_prints(mlir.entry_block(mlir.main_function(module)))
        counts = {"mhlo.num_partitions": prod(plan.mesh_axes.values()), "mhlo.num_replicas": 1}
        for name, count in counts.items():
            module.operation.attributes[name] = ir.IntegerAttr.get(
                ir.IntegerType.get_signless(32), count
            )
        module.operation.verify()
        return str(module.operation.get_asm(enable_debug_info=True))
