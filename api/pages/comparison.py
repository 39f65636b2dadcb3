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
from shardwright.reports.comparison_page import comparison_sections

_REMEMBERED_ROWS = 1024


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


def comparison_view(store: Store, one: Comparison) -> dict[str, Any]:
    """The context of a comparison's page: rows of finished plans, and how far the others are."""
    jobs = store.comparisons.jobs(one)
    rows = [row for job in jobs.values() if (row := _row(store, job)) is not None]
    live = any(not job.is_final for job in jobs.values())
    sections = comparison_sections(rows, _links(jobs), finished=not live) if rows else None
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


def _row(store: Store, job: Job) -> ComparisonRow | None:
    return _finished_row(store, job.id) if job.status == "succeeded" else None


@lru_cache(maxsize=_REMEMBERED_ROWS)
def _finished_row(store: Store, job_id: str) -> ComparisonRow | None:
    """The row of a plan, which never changes; None where its file cannot be read."""
    job = store.jobs.get(None, job_id)
    try:
        content = None if job is None else store.read_result(job, "plan.json")
        plan = PlanModel.model_validate_json(content or b"")
    except (ValidationError, OSError):
        return None
    tokens = plan.program.tokens_per_step
    return row_of_plan(plan, tokens_per_step=None if tokens is None else int(tokens))
