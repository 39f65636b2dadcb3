"""Comparisons as the pages show them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

from pydantic import ValidationError

from shardwright.api.pages import views
from shardwright.api.store import Comparison, Job, Store
from shardwright.planner.comparison_rows import ComparisonRow, row_of_plan
from shardwright.planner.plan_schema import PlanModel
from shardwright.planner.prices import Prices
from shardwright.reports.comparison_page import comparison_sections

_REMEMBERED_PLANS = 512


@dataclass(frozen=True)
class ListedComparison:
    """A comparison in a list."""

    id: str
    name: str
    options: str
    slices: str
    created_at: datetime


def listed(one: Comparison) -> ListedComparison:
    """A comparison as a row of a list."""
    model = one.request.get("model") or {}
    return ListedComparison(
        id=one.id,
        name=model.get("name") or f"program {str(one.request.get('program') or '')[:12]}",
        options=views.options_text(one.request),
        slices=", ".join(one.plans),
        created_at=one.created_at,
    )


def comparison_view(store: Store, one: Comparison, prices: Prices | None) -> dict[str, Any]:
    """The context of a comparison's page: rows of finished plans, and how far the others are."""
    jobs = store.comparisons.jobs(one)
    plans = [plan for job in jobs.values() if (plan := _plan(store, job)) is not None]
    live = any(not job.is_final for job in jobs.values())
    sections = None
    if plans:
        rows = [_row(plan, prices) for plan in plans]
        unit = plans[0].program.unit
        sections = comparison_sections(rows, _links(jobs), unit, finished=not live)
    return {
        "comparison": listed(one),
        "sections": sections,
        "charts": sections is not None and 'data-figure="' in sections,
        "others": [views.plan_row(job) for job in jobs.values() if job.status != "succeeded"],
        "live": live,
        "finished": sum(job.is_final for job in jobs.values()),
        "total": len(jobs),
    }


def _links(jobs: Mapping[str, Job]) -> dict[str, str]:
    return {topology: f"/plans/{job.id}" for topology, job in jobs.items()}


def _plan(store: Store, job: Job) -> PlanModel | None:
    """The plan of a job; None where it is not there or its file cannot be read."""
    if job.status != "succeeded":
        return None
    try:
        return _finished_plan(store, job.id, job.owner)
    except (ValidationError, OSError):
        return None


def _row(plan: PlanModel, prices: Prices | None) -> ComparisonRow:
    tokens = plan.program.tokens_per_step
    return row_of_plan(plan, tokens_per_step=None if tokens is None else int(tokens), prices=prices)


@lru_cache(maxsize=_REMEMBERED_PLANS)
def _finished_plan(store: Store, job_id: str, owner: str) -> PlanModel:
    """A plan without what only its own page shows."""
    job = store.jobs.get(owner, job_id)
    content = None if job is None else store.read_result(job, "plan.json")
    plan = PlanModel.model_validate_json(content or b"")
    small = plan.estimate.model_copy(
        update={"collectives": [], "peak_buffers": [], "memory": None, "schedule": []}
    )
    return plan.model_copy(update={"constraints": [], "estimate": small, "meshes_considered": []})
