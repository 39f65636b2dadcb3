"""What runs in a worker: looking into a program, planning, pricing.

Nothing here trusts a program: it is parsed, and never executed or unpickled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from jax._src.export import _export

from shardwright.errors import InputError
from shardwright.hardware_profiles.chip import ChipProfile, parse_chip
from shardwright.models import ReferenceModel, build
from shardwright.models.choices import model_variants
from shardwright.models.logical_axes import decoder_names
from shardwright.planner.annotated import annotated_stablehlo
from shardwright.planner.hand_made import evaluate
from shardwright.planner.origin import with_origin
from shardwright.planner.plan import Plan
from shardwright.planner.plan_schema import Unit
from shardwright.planner.planning import plan
from shardwright.planner.program import Program
from shardwright.planner.program_bytes import read_program
from shardwright.planner.program_facts import program_facts
from shardwright.planner.search import Progress
from shardwright.planner.spec_patterns import spec_of_data, tree_specs

_SAFE_CONTAINERS = frozenset({"collections.OrderedDict"})
"""Pytree containers that JAX itself reads from artifacts: of JSON, without running anything."""

ReportProgress = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class _Subject:
    """What is planned: a program, and what is known of it beyond its module."""

    program: Program
    name: str | None = None
    model_flops: float | None = None
    tokens_per_step: float | None = None
    unit: Unit = "tokens"


class _Stages:
    """Seconds of each stage; a stage ends when the next begins."""

    def __init__(self, report: ReportProgress) -> None:
        self._report = report
        self._last = Progress("")
        self._began = time.monotonic()
        self.seconds: dict[str, float] = {}

    def begin(self, stage: str) -> None:
        """Begins a stage in which what was found so far stays so."""
        self.tell(replace(self._last, stage=stage, message=""))

    def tell(self, progress: Progress) -> None:
        """Tells progress, which may begin a stage."""
        if progress.meshes < self._last.meshes:  # a stage that knows nothing of the search
            progress = replace(self._last, stage=progress.stage, message=progress.message)
        self.end()
        self._last = progress
        self._report(asdict(progress))

    def end(self) -> None:
        """Ends the stage."""
        now, stage = time.monotonic(), self._last.stage
        if stage:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._began
        self._began = now


def run(
    kind: str,
    request: Mapping[str, Any],
    program: Path | None,
    out: Path,
    report: ReportProgress,
) -> dict[str, Any]:
    """Does one task.

    Args:
      kind: "inspect", "plan" or "evaluate".
      request: as the service checked it.
      program: the uploaded program, where the request names no model.
      out: where the files of the result go.

    Returns:
      "summary", "files" (their names) and "stage_seconds".

    Raises:
      ShardwrightError: the request cannot be met.
    """
    stages = _Stages(report)
    stages.begin("read")
    subject = _subject(request, program)
    work = {"inspect": _inspect, "plan": _plan, "evaluate": _evaluate}[kind]
    summary, files = work(subject, request, stages)
    stages.begin("write")
    for name, text in files.items():
        (out / name).write_text(text, encoding="utf-8")
    stages.end()
    return {"summary": summary, "files": list(files), "stage_seconds": stages.seconds}


def warm_up() -> None:
    """Plans something tiny, so that the first task finds everything loaded and compiled."""
    read_only_safe_containers()
    model = build("mlp", features=8, hidden=16, layers=2, classes=8, batch=8)
    plan(model.train_step, *model.example_args, topology="v5e:2x2", time_limit_s=0.1)


def read_only_safe_containers() -> None:
    """Has JAX refuse artifacts with pytree containers that other code would have to read.

    A library that registers a container with `jax.export` says how its data is read, by pickle
    perhaps; what an artifact names must not choose such code.
    """
    for name in _export.deserialization_registry.keys() - _SAFE_CONTAINERS:
        del _export.deserialization_registry[name]


def _subject(request: Mapping[str, Any], program: Path | None) -> _Subject:
    model_flops = request.get("model_flops")
    if program is not None:
        return _Subject(read_program(program.read_bytes()), None, model_flops)
    model = request.get("model")
    if not isinstance(model, Mapping):
        raise InputError("neither a program nor a model is named", where="request", do="Give one")
    built = build(model["name"], **model.get("options", {}))
    traced = _traced(built)
    flops = float(built.model_flops_per_step) if model_flops is None else model_flops
    return _Subject(traced, built.name, flops, built.tokens_per_step, built.options.unit)


def _traced(model: ReferenceModel) -> Program:
    return Program.trace(model.train_step, *model.example_args, donate_argnums=model.donate_argnums)


def _inspect(
    subject: _Subject, request: Mapping[str, Any], stages: _Stages
) -> tuple[dict[str, Any], dict[str, str]]:
    stages.begin("inspect")
    return program_facts(subject.program).model_dump(mode="json"), {}


def _plan(
    subject: _Subject, request: Mapping[str, Any], stages: _Stages
) -> tuple[dict[str, Any], dict[str, str]]:
    model: Mapping[str, Any] = request.get("model") or {}
    choices = request.get("choices")
    forms = model_variants(model["name"], model.get("options", {}), choices) if choices else None
    made = plan(
        subject.program if forms is None else None,
        variants=forms,
        topology=request["topology"],
        mesh=request.get("mesh"),
        pinned=request.get("pinned"),
        memory_fraction=request.get("memory_fraction", 0.9),
        time_limit_s=request.get("time_limit_s", 12.0),
        seed=request.get("seed", 0),
        model_flops=subject.model_flops,
        chip=_chip(request),
        name=subject.name,
        tokens_per_step=subject.tokens_per_step,
        on_progress=stages.tell,
        **_layout(request, subject.program),
    )
    program = subject.program
    chosen: Mapping[str, Any] = {}
    if forms is not None:
        chosen = forms[made.data.variant or ""].options
        program = _traced(build(model["name"], **{**model.get("options", {}), **chosen}))
    if model:
        made.data = with_origin(
            made.data,
            model["name"],
            options={**model.get("options", {}), **chosen},
            unit=subject.unit,
        )
    stages.begin("annotate")
    files = {
        "plan.json": made.to_json() + "\n",
        "annotated.mlir": annotated_stablehlo(program, made),
    }
    return _summary(made), files


def _layout(request: Mapping[str, Any], program: Program) -> dict[str, Any]:
    """What `plan` is asked of layouts; models whose parameters are named as ours have names."""
    if request.get("layout", "free") == "free":
        return {}
    given = request.get("logical_axes")
    if given is None:
        paths = [tensor.path for tensor in program.inputs]
        named = decoder_names(paths, [len(tensor.shape) for tensor in program.inputs])
    else:
        named = {path: tuple(names) for path, names in given.items()}
    return {"layout": request["layout"], "logical_axes": named}


def _summary(made: Plan) -> dict[str, Any]:
    estimate = made.estimate
    return {
        "name": made.data.program.name,
        "mesh_axes": made.mesh_axes,
        "step_time_s": estimate.step_time_s,
        "peak_memory_bytes": estimate.peak_memory_bytes,
        "memory_capacity_bytes": estimate.memory_capacity_bytes,
        "mfu": estimate.mfu,
        "gap": made.solver.gap,
        "solver_status": made.solver.status,
    }


def _evaluate(
    subject: _Subject, request: Mapping[str, Any], stages: _Stages
) -> tuple[dict[str, Any], dict[str, str]]:
    stages.begin("evaluate")
    program = subject.program
    sides = {
        "in_specs": (program.inputs, program.in_tree),
        "out_specs": (program.outputs, program.out_tree),
    }
    specs: dict[str, Any] = {}
    unmatched: dict[str, list[str]] = {}
    for side, (tensors, tree) in sides.items():
        given = request.get(side)
        if given is None:
            specs[side], unmatched[side] = None, []
            continue
        patterns = {key: spec_of_data(spec, f"{side} {key}") for key, spec in given.items()}
        paths = [tensor.path for tensor in tensors]
        specs[side], unmatched[side] = tree_specs(patterns, paths, tree, side)
    estimate = evaluate(
        program,
        topology=request["topology"],
        mesh=request["mesh"],
        in_specs=specs["in_specs"],
        out_specs=specs["out_specs"],
        model_flops=subject.model_flops,
        chip=_chip(request),
    )
    summary = {
        "name": subject.name or program.name,
        "mesh_axes": dict(request["mesh"]),
        "step_time_s": estimate.step_time_s,
        "peak_memory_bytes": estimate.peak_memory_bytes,
        "memory_capacity_bytes": estimate.memory_capacity_bytes,
        "mfu": estimate.mfu,
        "replicated": unmatched["in_specs"],
    }
    return summary, {"estimate.json": estimate.model_dump_json(indent=1) + "\n"}


def _chip(request: Mapping[str, Any]) -> ChipProfile | None:
    profile = request.get("chip")
    return None if profile is None else parse_chip(profile, where="chip")
