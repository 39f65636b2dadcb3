"""The work of an exploration: one hypothetical slice after another, on one traced program."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwright.hardware_profiles import LogicalMesh, Slice, parse_slice
from shardwright.hardware_profiles.chip import parse_chip
from shardwright.planner.evaluation import Evaluation, evaluate_partitioned
from shardwright.planner.explore_model import PointModel, SeedModel
from shardwright.planner.explore_space import RESOURCES, Hypothesis, Value, hypothesis
from shardwright.planner.fixed import fixed_strategies
from shardwright.planner.flops import matrix_flops
from shardwright.planner.mesh_solution import (
    Candidate,
    Estimate,
    estimate_mesh,
    evaluate_choices,
    solve_mesh,
)
from shardwright.planner.partitioned import Partitioned
from shardwright.planner.planning import meshes_on
from shardwright.planner.prepared import Prepared, prepare
from shardwright.planner.program import Program
from shardwright.planner.search import Progress, search_meshes
from shardwright.planner.solver import Solution
from shardwright.planner.workers import Task

_MESHES_SOLVED = 2
"""Meshes, those of the plans that are best as they are, that are solved anew for a point."""
_SECONDS_A_MESH = 4.0
_GAP = 1e-3
MOST_PLANS = 12
"""Plans of one torus that are kept to price on the next point."""
_A_LITTLE = 1.01
_UNPRICED = ("memory",)
"""Resources of which more changes no price."""


@dataclass(frozen=True)
class PointTask:
    """One point to plan.

    Attributes:
      base: of the exploration; its chip as JSON where it is not a bundled one.
      known: plans on the same torus to begin with.
      search: look for better plans than those that are known.
    """

    program: Program
    base: str
    base_chip: str | None
    values: dict[str, Value]
    memory_fraction: float
    time_limit_s: float
    seed: int
    model_flops: float | None
    known: tuple[SeedModel, ...] = ()
    search: bool = True

    def as_task(self) -> Task:
        """For another process, which has no use for pytrees and kernels' functions."""
        bare = dataclasses.replace(self.program, in_tree=None, out_tree=None, kernel_calls=())
        told = dataclasses.replace(self, program=bare)
        return Task("shardwright.planner.explore_points:run", told)


@dataclass(frozen=True)
class _Kept:
    """A plan that can be priced on every chip with its torus."""

    mesh: LogicalMesh
    choices: tuple[int, ...]
    partitioned: Partitioned = field(repr=False)


class _Bench:
    """A program, prepared once, and the plans that were found for each torus."""

    def __init__(self, program: Program) -> None:
        self.prepared: Prepared = prepare(program)
        self.plans: dict[tuple[Any, ...], list[_Kept]] = {}

    def plan(self, task: PointTask, at: Hypothesis, report: Callable[[Progress], None]) -> _Kept:
        """The best plan for a point: one that is known, or a better one on the best meshes.

        Raises:
          DoesNotFitError: none keeps within the memory.
        """
        plans = self.plans.setdefault((at.slice.shape, at.slice.count), [])
        for seed in task.known:
            mesh = LogicalMesh.from_json({**seed.mesh, "slice": at.slice.name}, at.slice.chip)
            choices = tuple(seed.choices)
            if all((p.mesh.axes, p.choices) != (mesh.axes, choices) for p in plans):
                self._learn(plans, self._restored(mesh, choices))
        limit = at.slice.chip.device_hbm_bytes * task.memory_fraction
        ranked = self._ranked(plans, at.slice, limit)
        if not ranked:
            return self._searched(task, at, limit, plans, report)
        best_s, best = ranked[0]
        if not task.search:
            return best
        meshes: dict[tuple[Any, ...], LogicalMesh] = {}
        for _, plan in ranked:
            meshes.setdefault(plan.mesh.axes, _laid(plan.mesh, at.slice))
        for mesh in list(meshes.values())[:_MESHES_SOLVED]:
            found = self._solved(task, mesh, limit, best_s)
            if found is not None and found.evaluation.step_s < best_s:
                best_s, best = found.evaluation.step_s, _kept(found)
        self._learn(plans, best)
        return best

    def price(self, plan: _Kept, on: Slice) -> Evaluation:
        """What a plan costs on a slice with its torus."""
        p = self.prepared
        mesh = _laid(plan.mesh, on)
        return evaluate_partitioned(p.graph, p.fusions, p.buffers, plan.partitioned, mesh)

    def _ranked(self, plans: Iterable[_Kept], on: Slice, limit: float) -> list[tuple[float, _Kept]]:
        priced = [(self.price(plan, on), plan) for plan in plans]
        fitting = [(e.step_s, plan) for e, plan in priced if e.peak.bytes <= limit]
        return sorted(fitting, key=lambda one: one[0])

    def _searched(
        self,
        task: PointTask,
        at: Hypothesis,
        limit: float,
        plans: list[_Kept],
        report: Callable[[Progress], None],
    ) -> _Kept:
        prepared = self.prepared
        found = search_meshes(
            prepared,
            meshes_on(at.slice, prepared.program.mesh_axes),
            limit,
            fixed_on=lambda m: fixed_strategies(prepared.nodes, (), m),
            time_limit_s=task.time_limit_s,
            seed=task.seed,
            on_progress=report,
        )
        for candidate in (*found.others, found.best):
            self._learn(plans, _kept(candidate))
        return _kept(found.best)

    def _solved(
        self, task: PointTask, mesh: LogicalMesh, limit: float, cutoff: float
    ) -> Candidate | None:
        """A plan on a mesh that takes less than the cutoff, where there is one."""
        prepared = self.prepared
        fixed = fixed_strategies(prepared.nodes, (), mesh)
        problem = prepared.problem(mesh, fixed)
        cutoff *= 1 - _GAP
        seconds, seed = _SECONDS_A_MESH, task.seed
        if prepared.large:
            estimate = estimate_mesh(problem, limit, seconds, seed, _GAP, cutoff=cutoff)
            if not isinstance(estimate, Estimate):
                return None
            outcome = solve_mesh(prepared, problem, limit, seconds, seed, _GAP, estimated=estimate)
        else:
            outcome = solve_mesh(prepared, problem, limit, seconds, seed, _GAP, cutoff=cutoff)
        return outcome if isinstance(outcome, Candidate) else None

    def _restored(self, mesh: LogicalMesh, choices: tuple[int, ...]) -> _Kept:
        """A plan of another process."""
        prepared = self.prepared
        fixed = fixed_strategies(prepared.nodes, (), mesh)
        solution = Solution(choices, 0.0, -math.inf, math.inf, "feasible", 0.0, 0.0, None)
        return _kept(evaluate_choices(prepared, prepared.problem(mesh, fixed), solution))

    @staticmethod
    def _learn(plans: list[_Kept], plan: _Kept) -> None:
        """Keeps a plan, the newest last, and forgets the oldest of too many."""
        plans[:] = [p for p in plans if (p.mesh.axes, p.choices) != (plan.mesh.axes, plan.choices)]
        plans.append(plan)
        del plans[:-MOST_PLANS]


def _kept(candidate: Candidate) -> _Kept:
    return _Kept(candidate.problem.mesh, candidate.solution.choices, candidate.partitioned)


def _laid(mesh: LogicalMesh, on: Slice) -> LogicalMesh:
    return dataclasses.replace(mesh, slice=on)


_BENCHES: dict[str, _Bench] = {}
"""The program that this process explores, by fingerprint; one at a time."""


def run(task: PointTask, report: Callable[[Progress], None]) -> PointModel:
    """Plans one point.

    Raises:
      DoesNotFitError: no plan keeps within the memory.
    """
    fingerprint = task.program.fingerprint
    if fingerprint not in _BENCHES:
        report(Progress("graph"))
        _BENCHES.clear()
        _BENCHES[fingerprint] = _Bench(task.program)
    bench = _BENCHES[fingerprint]
    base = base_slice(task.base, task.base_chip)
    at = hypothesis(base, task.values)
    plan = bench.plan(task, at, report)
    evaluation = bench.price(plan, at.slice)
    return _point(task, at, bench, plan, evaluation).model_copy(
        update={
            "sensitivity": _sensitivity(task, base, bench, plan, evaluation.step_s),
            "compared": 0 if task.search else len(task.known),
        }
    )


def base_slice(topology: str, chip: str | None) -> Slice:
    """The slice of a topology, with a chip as JSON where it is not a known one."""
    return parse_slice(topology, None if chip is None else parse_chip(chip))


def unplanned(values: dict[str, Value], at: Hypothesis, status: Any, message: str) -> PointModel:
    """A point without a plan."""
    return PointModel(
        values=values,
        torus=at.torus,
        wraps=list(at.slice.wraps),
        chips=at.slice.chips,
        resources=dict(at.resources),
        status=status,
        message=message,
    )


def _point(
    task: PointTask, at: Hypothesis, bench: _Bench, plan: _Kept, evaluation: Evaluation
) -> PointModel:
    on = at.slice
    flops = task.model_flops or matrix_flops(bench.prepared.graph)
    peak = on.chip.device_peak_flops("bf16") * on.devices
    step = evaluation.step_s
    return unplanned(task.values, at, "planned", "").model_copy(
        update={
            "step_time_s": step,
            "compute_time_s": evaluation.compute_s,
            "exposed_collective_time_s": evaluation.exposed_collective_s,
            "peak_memory_bytes": evaluation.peak.bytes,
            "memory_limit_bytes": on.chip.device_hbm_bytes * task.memory_fraction,
            "mfu": flops / (peak * step) if step else 0.0,
            "mesh": _laid(plan.mesh, on).describe(),
            "seed": SeedModel(mesh=plan.mesh.to_json(), choices=list(plan.choices)),
        }
    )


def _sensitivity(
    task: PointTask, base: Slice, bench: _Bench, plan: _Kept, step_s: float
) -> dict[str, float]:
    """Percent by which the step changes with 1 % more of each resource, the plan kept."""
    found = {}
    for name in _priced(base):
        more = {**task.values, name: float(task.values.get(name, 1.0)) * _A_LITTLE}
        then = bench.price(plan, hypothesis(base, more).slice).step_s
        found[name] = 100 * (then / step_s - 1) if step_s else 0.0
    return found


def _priced(base: Slice) -> Sequence[str]:
    left_out = (*_UNPRICED, *(() if base.count > 1 else ("dcn_bandwidth",)))
    return [name for name in RESOURCES if name not in left_out]
