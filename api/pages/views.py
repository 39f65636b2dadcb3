"""Jobs and choices as the pages show them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any

from shardwright.api.store import Job
from shardwright.hardware_profiles import chip_names, load_chip
from shardwright.hardware_profiles.slices import legal_slices
from shardwright.models.registry import checked_options, model_names
from shardwright.reports.facts import STAGES
from shardwright.reports.numbers import quantity

STATUS_SIGNS = {
    "queued": "○",
    "running": "◐",
    "succeeded": "●",
    "failed": "✕",
    "cancelled": "–",
}
_SUGGESTED_SLICES = 24


@dataclass(frozen=True)
class PlanRow:
    """A plan in a list; texts are empty where they do not apply yet."""

    id: str
    name: str
    options: str
    topology: str
    status: str
    sign: str
    told: str
    step_time: str
    mfu: str
    memory: str
    mesh: str
    created_at: datetime


def plan_row(job: Job) -> PlanRow:
    """A plan's job as a row."""
    summary = job.summary or {}
    step, mfu, peak = (summary.get(k) for k in ("step_time_s", "mfu", "peak_memory_bytes"))
    axes = summary.get("mesh_axes") or {}
    return PlanRow(
        id=job.id,
        name=job_name(job),
        options=options_text(job.request),
        topology=job.topology or "",
        status=job.status,
        sign=STATUS_SIGNS[job.status],
        told=told(job),
        step_time="" if step is None else quantity(step, "s"),
        mfu="" if mfu is None else f"{100 * mfu:.1f} %",
        memory="" if peak is None else quantity(peak, "B"),
        mesh=", ".join(f"{axis}={size}" for axis, size in axes.items()),
        created_at=job.created_at,
    )


def job_name(job: Job) -> str:
    """The model of a job, or the beginning of its program's id."""
    return job.model or f"program {(job.program or '')[:12]}"


def options_text(request: Mapping[str, Any]) -> str:
    """What was asked of a model beyond its name: "batch=256, remat=full"."""
    options = (request.get("model") or {}).get("options") or {}
    return ", ".join(f"{name}={value}" for name, value in options.items())


def told(job: Job) -> str:
    """How far a job is, or why it failed, in one line."""
    if job.status == "failed":
        return str((job.error or {}).get("what", ""))
    return progress_text(job.progress) if job.status == "running" else ""


def progress_text(progress: Mapping[str, Any]) -> str:
    """How far a job is: "searching meshes: 3 of 17 tried, best 5.16 s"."""
    stage = progress.get("stage")
    if not stage:
        return "starting"
    text = STAGES.get(stage, str(stage))
    if progress.get("meshes"):
        text += f": {progress.get('meshes_tried') or 0} of {progress['meshes']} tried"
    if progress.get("best_step_s") is not None:
        text += f", best {quantity(progress['best_step_s'], 's')}"
    return text


@dataclass(frozen=True)
class ModelChoice:
    """A reference model in the form, with the options that its preset gives."""

    name: str
    batch: int
    sequence: int | None
    layers: int | None


@cache
def model_choices() -> tuple[ModelChoice, ...]:
    """The reference models."""
    presets = {name: checked_options(name, {}).model_dump() for name in model_names()}
    return tuple(
        ModelChoice(name, preset["batch"], preset.get("sequence"), preset.get("layers"))
        for name, preset in presets.items()
    )


@cache
def slice_choices() -> dict[str, tuple[str, ...]]:
    """Slices to suggest: generation -> names, the smallest of each."""
    return {
        name: tuple(one.name for one in legal_slices(load_chip(name))[:_SUGGESTED_SLICES])
        for name in chip_names()
    }
