"""Plans against hand-made shardings under the TPU compiler.

    python benchmarks/quality.py [--cases NAME ...] [--shardings NAME ...] [--cached] [--plan-again]

Each program of `quality_cases.py` is planned, its mesh searched, and sharded by hand in four ways,
each on the mesh on which the exact evaluation finds it fastest. All five are compiled by libtpu for
the slice and timed by one function from the schedule that the compiler made
(`shardwright.planner.compiled_schedule`): estimated cycles of the kernels, and collectives priced
by their bytes and groups, exposed where no kernel runs beside them. The claim: no sharding by hand
that fits is faster than the plan. *LOST* marks where that fails.

Plans are compiled with their compiler options, shardings by hand with the compiler's defaults.
Plans and what was compiled are kept in the user's cache (`SHARDWRIGHT_CACHE`); `--cached` compiles
nothing and leaves out what is not there, `--plan-again` plans anew. No TPU is needed; needs the
`tpu` extra. A compile takes some 20 s of CPU.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from quality_cases import CASES, ByHand, Case

import shardwright as sw
from shardwright.hardware_profiles.mesh import meshes_for_shape
from shardwright.hardware_profiles.slices import parse_slice
from shardwright.planner.cache_folder import cache_folder
from shardwright.planner.compiled_cache import compiled_for_tpu, is_compiled
from shardwright.planner.compiled_schedule import CompiledTime, compiled_time
from shardwright.planner.hand_made import flat_shardings
from shardwright.planner.hlo import parse_hlo
from shardwright.planner.plan_data import spec_of
from shardwright.planner.program import Program
from shardwright.planner.tracing import in_mesh

PLAN = "plan"
TIME_LIMIT_S = 15.0
NOT_WORSE = 1.0005
"""Steps that differ by less than this count as equally long."""


@dataclass(frozen=True)
class Row:
    """One sharding of a program as it was compiled; `time` is None where it does not fit."""

    sharding: str
    mesh: dict[str, int]
    predicted_s: float
    time: CompiledTime | None
    peak_bytes: float


def planned(case: Case, *, again: bool = False) -> tuple[sw.Plan, Program]:
    """The plan of a case, kept from one run to the next."""
    fn, args, donated = case.make()
    program = Program.trace(fn, *args, donate_argnums=donated)
    kept = cache_folder("quality") / f"{case.slug}-{program.fingerprint[:16]}.json"
    if kept.exists() and not again:
        return sw.Plan.load(kept), program
    plan = sw.plan(program, topology=case.topology, time_limit_s=TIME_LIMIT_S, name=case.name)
    kept.parent.mkdir(parents=True, exist_ok=True)
    plan.save(kept)
    return plan, program


def sharded_by_hand(case: Case, hand: ByHand, like: sw.Plan) -> tuple[sw.Plan, Program] | None:
    """A sharding by hand in the form of a plan without constraints of its own.

    On the mesh where it is fastest by the exact evaluation, or takes least memory if none fits.
    None where no mesh suits it.
    """
    limit = like.estimate.memory_capacity_bytes * like.data.options.memory_fraction
    tried = []
    fn, args, donated = case.make(**hand.cuts)
    specs = hand.specs(args)
    for mesh in hand.meshes:
        try:
            estimate = sw.evaluate(
                fn,
                *args,
                topology=case.topology,
                mesh=mesh,
                in_specs=specs,
                donate_argnums=donated,
            )
        except sw.InputError:  # a dimension that the mesh does not divide
            continue
        over = max(0.0, estimate.peak_memory_bytes - limit)
        tried.append((over, estimate.step_time_s, mesh, estimate))
    if not tried:
        return None
    *_, mesh, estimate = min(tried, key=lambda one: one[:2])
    program = in_mesh(mesh, lambda: Program.trace(fn, *args, donate_argnums=donated))
    layout = meshes_for_shape(parse_slice(case.topology), mesh)[0]
    ins = flat_shardings(specs, program.in_tree, program.inputs, mesh, "in_specs")
    kept = {out: ins[given] for out, given in program.aliases.items()}
    tensors = {
        "inputs": [
            _tensor(tensor, spec_of(sharding))
            for tensor, sharding in zip(program.inputs, ins, strict=True)
        ],
        "outputs": [
            _tensor(tensor, spec_of(kept[i]) if i in kept else [[] for _ in tensor.shape])
            for i, tensor in enumerate(program.outputs)
        ],
    }
    data = like.data.model_copy(
        update={
            "program": like.data.program.model_copy(
                update={"fingerprint": program.fingerprint, **tensors}
            ),
            "mesh": layout.to_json(),
            "mesh_axes": dict(mesh),
            "constraints": [],
            "kernels": [],
            "estimate": estimate,
            "compiler_options": {},
        }
    )
    return sw.Plan(data), program


def _tensor(tensor: Any, spec: list[list[str]]) -> Any:
    from shardwright.planner.plan_schema import TensorModel

    return TensorModel(path=tensor.path, shape=list(tensor.shape), dtype=tensor.dtype, spec=spec)


def compiled_row(sharding: str, plan: sw.Plan, program: Program) -> Row:
    """Compiles a program under a plan, and times what was made."""
    made = compiled_for_tpu(plan, program)
    time = None
    if not made.refused:
        time = compiled_time(parse_hlo(made.hlo), plan.logical_mesh)
    peak = made.result["memory"]["peak"] if made.result else float("inf")
    return Row(sharding, plan.mesh_axes, plan.estimate.step_time_s, time, peak)


def rows(case: Case, shardings: list[str] | None, *, cached: bool, again: bool) -> Iterator[Row]:
    """The plan and the shardings by hand of a case."""
    plan, program = planned(case, again=again)
    several = [(PLAN, plan, program)]
    for hand in case.by_hand:
        made = sharded_by_hand(case, hand, plan)
        if made is not None:
            several.append((hand.name, *made))
    for name, one, of in several:
        if shardings and name not in shardings:
            continue
        if not cached or is_compiled(one, of):
            yield compiled_row(name, one, of)


HEADER = (
    "| program | slice | sharding | mesh | predicted ms | compiled ms = compute + exposed "
    "| collectives ms | peak GB | plan / best by hand |\n" + "|---" * 9 + "|"
)


def lines(case: Case, found: list[Row]) -> Iterator[str]:
    """The table's lines of a case; the last column stands with the plan."""
    by_hand = [row.time.step_s for row in found if row.sharding != PLAN and row.time]
    for row in found:
        mesh = " x ".join(f"{axis} {size}" for axis, size in row.mesh.items())
        verdict = ""
        if row.sharding == PLAN and by_hand:
            ratio = row.time.step_s / min(by_hand) if row.time else float("inf")
            verdict = f"**{ratio:.3f}**" if ratio <= NOT_WORSE else f"**LOST {ratio:.3f}**"
        told = "does not fit | "
        if row.time:
            told = (
                f"{row.time.step_s * 1e3:.2f} = {row.time.compute_s * 1e3:.2f} + "
                f"{row.time.exposed_s * 1e3:.2f} | {row.time.collective_s * 1e3:.2f}"
            )
        yield (
            f"| {case.name} | {case.topology} | {row.sharding} | {mesh} "
            f"| {row.predicted_s * 1e3:.2f} | {told} | {row.peak_bytes / 1e9:.2f} | {verdict} |"
        )


def main() -> None:
    """Runs the cases and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [case.name for case in CASES]
    parser.add_argument("--cases", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--shardings", nargs="+", metavar="NAME", help=f"such as {PLAN} or FSDP")
    parser.add_argument("--cached", action="store_true", help="compile nothing")
    parser.add_argument("--plan-again", action="store_true")
    given = parser.parse_args()
    print(HEADER, flush=True)
    for case in CASES:
        if case.name in given.cases:
            found = list(rows(case, given.shardings, cached=given.cached, again=given.plan_again))
            print("\n".join(lines(case, found)), flush=True)


if __name__ == "__main__":
    main()
