"""What the store gives out: plain records, free of the database."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

JobKind = Literal["plan", "evaluate", "inspect"]
JobStatus = Literal["queued", "running", "succeeded", "failed", "cancelled"]
ProgramStatus = Literal["inspecting", "ready", "invalid"]
Scope = Literal["read", "plan", "admin"]

FINAL_STATUSES: frozenset[str] = frozenset({"succeeded", "failed", "cancelled"})

_FOLDERS: dict[JobKind, str] = {
    "plan": "plans",
    "evaluate": "evaluations",
    "inspect": "inspections",
}


@dataclass(frozen=True)
class Job:
    """One piece of work.

    Attributes:
      request: what was asked, as canonical JSON.
      digest: SHA-256 of kind, request and versions; equal for equal work.
      topology, model, program: from the request, for filters; None where it has none.
      attempts: how often it was started.
      progress: stage, meshes_tried, meshes, best_step_s, gap, message; empty before the first.
      error: kind, title, detail, what, where, do; where it failed.
      summary: what lists show of the result.
      files: name -> path in the store of files, once it has succeeded.
    """

    id: str
    kind: JobKind
    owner: str
    key_id: str | None
    request: Mapping[str, Any] = field(repr=False)
    digest: str
    topology: str | None
    model: str | None
    program: str | None
    status: JobStatus
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    attempts: int
    progress: Mapping[str, Any]
    error: Mapping[str, Any] | None
    summary: Mapping[str, Any] | None = field(repr=False)
    files: Mapping[str, str]

    @property
    def is_final(self) -> bool:
        """Nothing more happens to it."""
        return self.status in FINAL_STATUSES

    @property
    def home(self) -> str:
        """The folder of its attempts in the store of files."""
        return home_of(self.kind, self.id)


def home_of(kind: JobKind, job_id: str) -> str:
    """The folder of a job's attempts in the store of files."""
    return f"{_FOLDERS[kind]}/{job_id}"


@dataclass(frozen=True)
class Claim:
    """A job that a dispatcher may run, and the token that proves it until the lease ends."""

    job: Job
    token: str


@dataclass(frozen=True)
class JobEvent:
    """Something that happened to a job; `seq` counts from 1 in each job."""

    job_id: str
    seq: int
    at: datetime
    name: Literal["progress", "done"]
    data: Mapping[str, Any]


@dataclass(frozen=True)
class ProgramRecord:
    """An uploaded program of one owner.

    Attributes:
      id: SHA-256 of its bytes, in hex.
      kind: "exported", "stablehlo-text" or "stablehlo-bytecode".
      facts: name, fingerprint, inputs, outputs and counts of operations, once it is ready.
      error: why it cannot be read, where it is invalid.
      path: in the store of files.
    """

    id: str
    owner: str
    kind: str
    nbytes: int
    status: ProgramStatus
    created_at: datetime
    facts: Mapping[str, Any] | None = field(repr=False)
    error: Mapping[str, Any] | None
    path: str


@dataclass(frozen=True)
class Key:
    """An API key, without its secret.

    Attributes:
      rate_limit_per_minute, plan_quota_per_day: None where the service's own limits hold.
    """

    id: str
    name: str
    owner: str
    scopes: tuple[Scope, ...]
    created_at: datetime
    revoked_at: datetime | None
    last_used_at: datetime | None
    rate_limit_per_minute: int | None
    plan_quota_per_day: int | None


@dataclass(frozen=True)
class Comparison:
    """One program or model planned on many slices.

    Attributes:
      plans: topology -> id of its plan, in the order asked.
    """

    id: str
    owner: str
    request: Mapping[str, Any]
    created_at: datetime
    plans: Mapping[str, str]
