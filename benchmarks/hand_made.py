"""Compares plans with shardings that people write by hand, by the same exact evaluation.

    python benchmarks/hand_made.py [--models NAME ...] [--slices SLICE ...] [--time-limit SECONDS]

Every sharding of `experts.py` is priced on every mesh that suits it and told by its best: the
fastest that fits 90% of the memory, or the one that needs least. The plan is `sw.plan` of the same
model without any constraint, its mesh searched. The claim: a plan fits wherever an expert fits, and
its step is at most as long as that of each expert that fits. Where that fails, the row says so.

A second table compares what the integer program knew of the chosen plan with the exact evaluation
of the partitioned program. The claim: communication within 10%.

Models are scanned with full rematerialisation, float32 parameters and moments, bfloat16 compute.
Tokens are 2048 a device on v5e, 4096 on v6e and 8192 on v5p, in sequences of 2048 (1024 for GPT-2).
GPT vocabularies are padded from 50257 to 50304, as people do so that they can be cut.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import experts

from shardwright.errors import DoesNotFitError
from shardwright.hardware_profiles.slices import parse_slice
from shardwright.models.registry import build
from shardwright.planner import planning
from shardwright.planner.plan import Plan
from shardwright.planner.search import SearchResult

MODELS = (
    "gpt2-124m",
    "llama3-8b",
    "gpt3-13b",
    "llama3-70b",
    "gpt3-175b",
    "llama3-405b",
)
SLICES = ("v5e:16x16", "v6e:16x16", "v5p:4x4x8")
TOKENS_A_DEVICE = {"v5e": 2048, "v6e": 4096, "v5p": 8192}
MEMORY_FRACTION = 0.9
NOT_WORSE = 1.0005
"""Steps that differ by less than this count as equally long."""


@dataclass(frozen=True)
class Planned:
    """A plan, how the search found it, and the seconds that it took."""

    plan: Plan
    found: SearchResult
    wall_s: float
    cpu_s: float


@dataclass(frozen=True)
class Case:
    """One model on one slice: the experts, and the plan or why there is none."""

    model: str
    topology: str
    tokens: int
    experts: tuple[experts.Priced, ...]
    planned: Planned | None
    no_plan: str

    @property
    def best_expert(self) -> experts.Priced | None:
        """The fastest expert that fits."""
        fitting = [e for e in self.experts if e.fits]
        return min(fitting, key=lambda e: e.estimate.step_time_s, default=None)

    @property
    def ratio(self) -> float | None:
        """Step time of the plan over that of the best expert that fits."""
        best = self.best_expert
        if best is None or self.planned is None:
            return None
        return self.planned.plan.estimate.step_time_s / best.estimate.step_time_s

    @property
    def verdict(self) -> str:
        """Whether the claim holds."""
        if self.planned is None:
            return "nothing fits" if self.best_expert is None else "LOST: the plan does not fit"
        if self.ratio is None:
            return "only the plan fits"
        return f"{self.ratio:.3f}" if self.ratio <= NOT_WORSE else f"LOST: {self.ratio:.3f}"


def model_options(model: str, topology: str) -> tuple[dict[str, Any], int]:
    """Options of a model on a slice, and the slice's devices."""
    on = parse_slice(topology)
    sequence = 1024 if model.startswith("gpt2") else 2048
    tokens = TOKENS_A_DEVICE[topology.split(":", maxsplit=1)[0]] * on.devices
    options: dict[str, Any] = {"sequence": sequence, "batch": tokens // sequence}
    if model.startswith("gpt"):
        options["vocab"] = 50304
    return options, on.devices


def make_plan(model: str, options: dict[str, Any], topology: str, time_limit_s: float) -> Planned:
    """Plans a model, keeping what the search found.

    Raises:
      DoesNotFitError: no plan fits.
    """
    found: list[SearchResult] = []

    def recording(*args: Any, **kwargs: Any) -> SearchResult:
        found.append(search(*args, **kwargs))
        return found[-1]

    search = planning.search_meshes
    built = build(model, **options)
    wall, cpu = time.perf_counter(), time.process_time()
    with mock.patch.object(planning, "search_meshes", recording):
        plan = planning.plan(
            built.train_step,
            *built.example_args,
            topology=topology,
            donate_argnums=built.donate_argnums,
            memory_fraction=MEMORY_FRACTION,
            time_limit_s=time_limit_s,
            model_flops=built.model_flops_per_step,
        )
    return Planned(plan, found[0], time.perf_counter() - wall, time.process_time() - cpu)


def run(model: str, topology: str, time_limit_s: float) -> Case:
    """Prices the experts and plans one model on one slice."""
    options, devices = model_options(model, topology)
    priced = [
        experts.price(expert, model, options, topology, devices, MEMORY_FRACTION)
        for expert in experts.EXPERTS
    ]
    planned, no_plan = None, ""
    try:
        planned = make_plan(model, options, topology, time_limit_s)
    except DoesNotFitError as error:
        no_plan = error.what
    tokens = options["batch"] * options["sequence"]
    kept = tuple(p for p in priced if p is not None)
    return Case(model, topology, tokens, kept, planned, no_plan)


def step_rows(case: Case) -> Iterator[str]:
    """The rows of a case: one an expert, then the plan."""
    head = f"{case.model} | {case.topology} | {case.tokens}"
    for expert in case.experts:
        yield f"| {head} | {expert.expert} | {_estimate(expert.mesh, expert.estimate)} | | |"
    if case.planned is None:
        yield f"| {head} | **plan** | no | | {case.no_plan} | | | **{case.verdict}** |"
        return
    planned = case.planned
    cells = _estimate(planned.plan.mesh_axes, planned.plan.estimate)
    seconds = f"{planned.wall_s:.1f} ({planned.cpu_s:.1f})"
    yield f"| {head} | **plan** | {cells} | {seconds} | **{case.verdict}** |"


STEP_HEADER = (
    "| model | slice | tokens | sharding | fits | step = compute + exposed, s | peak GB | mesh "
    "| planning s (CPU) | plan / best expert |\n" + "|---" * 10 + "|"
)


def _estimate(mesh: dict[str, int], estimate: Any) -> str:
    limit = estimate.memory_capacity_bytes * MEMORY_FRACTION
    fits = "yes" if estimate.peak_memory_bytes <= limit else "no"
    step = (
        f"{estimate.step_time_s:.4f} = {estimate.compute_time_s:.4f} "
        f"+ {estimate.exposed_collective_time_s:.4f}"
    )
    axes = " x ".join(f"{name} {size}" for name, size in mesh.items())
    return f"{fits} | {step} | {estimate.peak_memory_bytes / 1e9:.2f} | {axes}"


ILP_HEADER = (
    "| model | slice | solver | gap | objective / step | compute, ILP / exact "
    "| communication s, ILP | exact | ILP / exact | meshes planned of all |\n" + "|---" * 10 + "|"
)


def ilp_row(case: Case) -> str:
    """What the integer program knew of a plan, against the exact evaluation."""
    if case.planned is None:
        return f"| {case.model} | {case.topology} | none |" + " |" * 7
    best, solver = case.planned.found.best, case.planned.plan.solver
    compute, gathers, exposed = best.problem.seconds(best.solution.choices)
    exact = best.evaluation
    ratio = (gathers + exposed) / exact.collective_s
    told = f"{ratio:.3f}" if abs(ratio - 1) <= 0.1 else f"**{ratio:.3f}**"
    considered = case.planned.found.considered
    tried = sum(c.status == "planned" for c in considered)
    return (
        f"| {case.model} | {case.topology} | {solver.status} | {solver.gap:.1e} "
        f"| {solver.objective / exact.step_s:.3f} | {compute / exact.compute_s:.3f} "
        f"| {gathers + exposed:.4f} | {exact.collective_s:.4f} | {told} "
        f"| {tried} of {len(considered)} |"
    )


def main() -> None:
    """Runs every case and prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--slices", nargs="+", default=SLICES)
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds a plan")
    given = parser.parse_args()
    cases = []
    print(STEP_HEADER)
    for model in given.models:
        for topology in given.slices:
            cases.append(run(model, topology, given.time_limit))
            print(*step_rows(cases[-1]), sep="\n", flush=True)
    print("\n" + ILP_HEADER)
    print(*map(ilp_row, cases), sep="\n")
    lost = [case for case in cases if case.verdict.startswith("LOST")]
    print(f"\n{len(cases) - len(lost)} of {len(cases)} cases hold the claim.")
    for case in lost:
        print(f"{case.model} on {case.topology}: {case.verdict} {case.no_plan}")
    sys.exit(bool(lost))


if __name__ == "__main__":
    main()
