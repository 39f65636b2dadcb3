"""The outcome of a search as a plan: data that people read and that runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jaxlib

from shardwright.cost_models.memory import memory_over_time
from shardwright.hardware_profiles.slices import Slice
from shardwright.planner.certificate import certificate
from shardwright.planner.evaluation import Evaluation
from shardwright.planner.flops import matrix_flops
from shardwright.planner.graph import OpGraph
from shardwright.planner.kernel_shardings import kernel_shardings
from shardwright.planner.plan import Plan
from shardwright.planner.plan_data import constraint_model, kernel_model, spec_of, tree_text
from shardwright.planner.plan_schema import (
    BufferModel,
    CollectiveModel,
    ComputeModel,
    EstimateModel,
    LoopSpanModel,
    MemoryModel,
    MeshModel,
    OptionsModel,
    PlanModel,
    ProgramModel,
    SolverModel,
    TensorModel,
    VariantModel,
    VersionsModel,
)
from shardwright.planner.prepared import Prepared
from shardwright.planner.schedule import schedule_models
from shardwright.planner.search import SearchResult
from shardwright.version import VERSION

COMPILER_OPTIONS = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}
"""Gathers and reductions stay collectives, as they are priced.

Otherwise libtpu 0.0.42.1 makes some of them permutes inside matrix products: a decoder on
tpu7x:2x2x2 took 35.8 ms of compute by its estimate with them and 14.8 ms without
(docs/benchmarks.md).
"""
_SHOWN_BUFFERS = 30
_SHOWN_LINES = 30
_MEMORY_POINTS = 240


def make_plan(
    prepared: Prepared,
    found: SearchResult,
    options: OptionsModel,
    model_flops: float | None,
    seconds: float,
    *,
    name: str | None = None,
    tokens_per_step: float | None = None,
    variant: str | None = None,
    variants: Sequence[VariantModel] = (),
) -> Plan:
    """The outcome of a search as a plan.

    Args:
      seconds: that the search took.
      variant: the name of the program among `variants`.
      options, model_flops, name, tokens_per_step: as for `plan`.
    """
    program, best = prepared.program, found.best
    on = best.problem.mesh.slice

    def tensors(given: Any, shardings: Any) -> list[TensorModel]:
        return [
            TensorModel(path=t.path, shape=list(t.shape), dtype=t.dtype, spec=spec_of(s))
            for t, s in zip(given, shardings, strict=True)
        ]

    return Plan(
        PlanModel(
            program=ProgramModel(
                name=name or program.name,
                tokens_per_step=tokens_per_step,
                fingerprint=program.fingerprint,
                inputs=tensors(program.inputs, best.in_shardings),
                outputs=tensors(program.outputs, best.out_shardings),
                aliases=sorted(program.aliases.items()),
                donate_argnums=list(program.donate_argnums),
                in_tree=tree_text(program.in_tree),
                out_tree=tree_text(program.out_tree),
            ),
            topology=on.name,
            chip=on.chip.model_dump(mode="json"),
            mesh=best.problem.mesh.to_json(),
            mesh_axes=dict(best.problem.mesh.shape),
            variant=variant,
            variants=list(variants),
            constraints=[constraint_model(c) for c in best.constraints],
            estimate=estimate_model(prepared, best.evaluation, on, model_flops),
            solver=SolverModel(
                status=best.solution.status,
                objective=best.solution.cost,
                bound=_finite(best.solution.bound),
                gap=_finite(best.solution.gap),
                wall_time_s=seconds,
                certificate=certificate(found),
            ),
            meshes_considered=[
                MeshModel(
                    axes=dict(c.mesh.shape),
                    layout=c.mesh.describe(),
                    status=c.status,
                    step_time_s=c.step_s,
                    peak_memory_bytes=c.peak_bytes,
                )
                for c in found.considered
            ],
            replicated_ops=_replicated_ops(prepared),
            kernels=[
                kernel_model(k) for k in kernel_shardings(best.problem, best.solution.choices)
            ],
            unpriced_ops=_unpriced_ops(prepared),
            assumptions=_assumptions(prepared),
            compiler_options=dict(COMPILER_OPTIONS),
            options=options,
            versions=VersionsModel(
                shardwright=VERSION,
                jax=jax.__version__,
                jaxlib=jaxlib.__version__,
                platform="tpu",
            ),
        ),
        program.in_tree,
        program.out_tree,
        program,
    )


def estimate_model(
    prepared: Prepared, evaluation: Evaluation, on: Slice, model_flops: float | None
) -> EstimateModel:
    """An evaluation as plan data."""
    graph = prepared.graph
    flops = matrix_flops(graph)
    counted = flops if model_flops is None else model_flops
    peak = on.chip.device_peak_flops("bf16") * on.devices
    priced = sorted(evaluation.collectives, key=lambda c: -c.seconds * c.communication.trips)
    return EstimateModel(
        step_time_s=evaluation.step_s,
        compute_time_s=evaluation.compute_s,
        collective_time_s=evaluation.collective_s,
        exposed_collective_time_s=evaluation.exposed_collective_s,
        host_copy_time_s=evaluation.host_copy_s,
        peak_memory_bytes=evaluation.peak.bytes,
        memory_capacity_bytes=on.chip.device_hbm_bytes,
        mfu=counted / (peak * evaluation.step_s) if evaluation.step_s else 0.0,
        matrix_flops=flops,
        collectives=[
            CollectiveModel(
                kind=c.kind,
                axes=[axis.name for axis in c.communication.step.axes],
                nbytes=c.nbytes,
                seconds=c.seconds,
                count=c.communication.trips,
                op=graph.ops[c.communication.near].name,
                source=graph.ops[c.communication.near].source,
                shape=list(c.communication.shape),
                dtype=c.communication.dtype,
                can_hide=c.can_hide,
                algorithm=c.algorithm,
            )
            for c in priced
            if c.kind != "all_slice"
        ],
        peak_buffers=[
            BufferModel(name=buffer.name, nbytes=buffer.nbytes, kind=buffer.kind)
            for buffer in evaluation.peak.live[:_SHOWN_BUFFERS]
        ],
        memory=_memory_model(graph, evaluation),
        compute=_compute_models(graph, evaluation),
        schedule=schedule_models(evaluation.schedule),
    )


def _memory_model(graph: OpGraph, evaluation: Evaluation) -> MemoryModel:
    held = memory_over_time(evaluation.buffers, _MEMORY_POINTS)
    lines = [graph.ops[time].source if time < len(graph.ops) else "" for time in held.times]
    sources = list(dict.fromkeys(line for line in lines if line))
    number = {line: index for index, line in enumerate(sources)}
    return MemoryModel(
        positions=list(held.times),
        nbytes={kind: [round(n) for n in row] for kind, row in held.by_kind.items()},
        sources=sources,
        source_of=[number.get(line, -1) for line in lines],
        operations=len(graph.ops),
        loops=[
            LoopSpanModel(
                first=loop.first_op - 1,
                last=loop.last_op,
                trips=loop.trips,
                source=graph.ops[loop.first_op - 1].source,
            )
            for loop in graph.loops
        ],
    )


def _compute_models(graph: OpGraph, evaluation: Evaluation) -> list[ComputeModel]:
    by_line: dict[str, dict[str, float]] = {}
    for op_id, seconds in evaluation.compute_by_op.items():
        op = graph.ops[op_id]
        by_op = by_line.setdefault(op.source, {})
        by_op[op.name] = by_op.get(op.name, 0.0) + seconds
    lines = [
        ComputeModel(source=line, op=max(by_op, key=by_op.__getitem__), seconds=sum(by_op.values()))
        for line, by_op in by_line.items()
    ]
    return sorted(lines, key=lambda line: -line.seconds)[:_SHOWN_LINES]


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _replicated_ops(prepared: Prepared) -> list[str]:
    nodes = prepared.nodes
    return [
        f"{op.name} at {op.source or op.key.location or 'an unknown place'}"
        for op in prepared.graph.ops
        if op.rule is None and not op.manual and nodes.node_of_op[op.id] >= 0
    ]


def _unpriced_ops(prepared: Prepared) -> list[str]:
    return [
        f"{op.name} at {op.source or op.key.location or 'an unknown place'}"
        for op in prepared.graph.ops
        if "pallas" in op.detail and op.detail["pallas"].flops is None
    ]


def _assumptions(prepared: Prepared) -> list[str]:
    graph = prepared.graph
    found = [
        f"the loop at {graph.ops[loop.first_op - 1].source} has an unknown number of passes and "
        "is counted once"
        for loop in graph.loops
        if not loop.known_trips
    ]
    branches = {join.op for join in graph.joins}
    found += [
        f"every branch at {graph.ops[op].source} is counted as equally likely"
        for op in sorted(branches)
    ]
    return found
