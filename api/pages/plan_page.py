"""What one plan's page shows, by its status."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from pydantic import ValidationError

from shardwright.api.pages import views
from shardwright.api.pages.forms import fields_of
from shardwright.api.resources import plan_resource
from shardwright.api.schemas import Progress
from shardwright.api.store import Job, Store
from shardwright.planner.plan_schema import PlanModel
from shardwright.reports.facts import STAGES
from shardwright.reports.sections import plan_headline, plan_sections

_REMEMBERED = 64
"""Pages of about 150 kB each."""


def plan_view(store: Store, job: Job) -> dict[str, Any]:
    """The context of a plan's page."""
    resource = plan_resource(job)
    shown: dict[str, Any] = {
        "job": job,
        "row": views.plan_row(job),
        "links": resource.links,
        "error": resource.error,
        "request_facts": _request_facts(job),
        "stages": STAGES,
        "form_fields": fields_of(job.request),
        "progress": resource.progress or Progress.model_validate({}),
        "told": views.progress_text(job.progress),
        "headline": None,
        "sections": None,
        "charts": False,
        "unreadable": False,
    }
    if job.status != "succeeded":
        return shown
    try:
        return shown | _finished(store, job.id, job.owner)
    except (ValidationError, OSError):
        return shown | {"unreadable": True}


@lru_cache(maxsize=_REMEMBERED)
def _finished(store: Store, job_id: str, owner: str) -> dict[str, Any]:
    """The parts of the page that never change once a plan is there.

    Raises:
      ValidationError, OSError: its file is missing or of another version.
    """
    job = store.jobs.get(owner, job_id)
    content = None if job is None else store.read_result(job, "plan.json")
    plan = PlanModel.model_validate_json(content or b"")
    sections = plan_sections(plan)
    return {
        "headline": plan_headline(plan),
        "sections": sections,
        "charts": 'data-figure="' in sections,
    }


def _request_facts(job: Job) -> list[tuple[str, str]]:
    request = job.request
    facts = [("slice", str(request.get("topology", "")))]
    if options := views.options_text(request):
        facts.append(("options", options))
    if mesh := request.get("mesh"):
        facts.append(("mesh", ", ".join(f"{axis}={size}" for axis, size in mesh.items())))
    if pinned := request.get("pinned"):
        facts.append(("pinned", f"{len(pinned)} shardings"))
    facts.append(("memory fraction", str(request.get("memory_fraction", ""))))
    facts.append(("time limit", f"{request.get('time_limit_s', '')} s"))
    return facts
