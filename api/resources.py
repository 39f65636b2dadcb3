"""Records of the store as the service shows them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwright.api.facts_schemas import ProgramLinks, ProgramResource
from shardwright.api.schemas import (
    ComparisonLinks,
    ComparisonResource,
    ComparisonRow,
    EvaluationLinks,
    EvaluationResource,
    JobError,
    PlanLinks,
    PlanResource,
    Progress,
    Status,
    Summary,
)
from shardwright.api.store import Comparison, Job, ProgramRecord
from shardwright.hardware_profiles import parse_slice
from shardwright.planner.plan_schema import EstimateModel
from shardwright.planner.program_facts_schema import ProgramFacts


def plan_links(plan_id: str) -> PlanLinks:
    """Where a plan's parts are."""
    at = f"/v1/plans/{plan_id}"
    return PlanLinks(
        self=at,
        events=f"{at}/events",
        plan=f"{at}/plan.json",
        annotated=f"{at}/annotated",
        report=f"{at}/report",
        page=f"/plans/{plan_id}",
    )


def _of_job(job: Job) -> dict[str, Any]:
    """What every resource of a job tells."""
    return {
        "id": job.id,
        "status": job.status,
        "created_at": job.created_at,
        "started_at": job.started_at,
        "finished_at": job.finished_at,
        "attempts": job.attempts,
        "request": dict(job.request),
        "progress": progress_of(job),
        "error": _error(job),
    }


def plan_resource(job: Job) -> PlanResource:
    """A plan's job."""
    return PlanResource(
        **_of_job(job),
        summary=None if job.summary is None else Summary.model_validate(job.summary),
        links=plan_links(job.id),
    )


def evaluation_resource(job: Job, estimate: bytes | None) -> EvaluationResource:
    """An evaluation's job.

    Args:
      estimate: JSON of what it found, where it has succeeded.
    """
    at = f"/v1/evaluations/{job.id}"
    return EvaluationResource(
        **_of_job(job),
        estimate=None if estimate is None else EstimateModel.model_validate_json(estimate),
        links=EvaluationLinks(self=at, events=f"{at}/events"),
    )


def program_resource(program: ProgramRecord) -> ProgramResource:
    """An uploaded program."""
    ready = program.status == "ready" and program.facts is not None
    return ProgramResource(
        id=program.id,
        kind=program.kind,
        nbytes=program.nbytes,
        status=program.status,
        created_at=program.created_at,
        facts=ProgramFacts.model_validate(program.facts) if ready else None,
        error=None if program.error is None else JobError.model_validate(program.error),
        links=ProgramLinks(self=f"/v1/programs/{program.id}"),
    )


def comparison_resource(comparison: Comparison, jobs: Mapping[str, Job]) -> ComparisonResource:
    """A comparison with the plans of its slices: topology -> job."""
    rows = []
    for topology, job in jobs.items():
        on = parse_slice(topology)
        plan = plan_resource(job)
        rows.append(
            ComparisonRow(
                topology=topology,
                chips=on.chips,
                devices=on.devices,
                plan=job.id,
                status=job.status,
                progress=plan.progress,
                summary=plan.summary,
                error=plan.error,
                links=plan.links,
            )
        )
    return ComparisonResource(
        id=comparison.id,
        status=_joint_status([row.status for row in rows]),
        created_at=comparison.created_at,
        request=dict(comparison.request),
        rows=rows,
        links=ComparisonLinks(
            self=f"/v1/comparisons/{comparison.id}", page=f"/comparisons/{comparison.id}"
        ),
    )


def progress_of(job: Job) -> Progress | None:
    """How far a job is; None before it has told."""
    return Progress.model_validate(job.progress) if job.progress else None


def _error(job: Job) -> JobError | None:
    return None if job.error is None else JobError.model_validate(job.error)


def _joint_status(statuses: list[Status]) -> Status:
    if all(status == "queued" for status in statuses):
        return "queued"
    if any(status in ("queued", "running") for status in statuses):
        return "running"
    for best in ("succeeded", "failed"):
        if best in statuses:
            return best
    return "cancelled"
