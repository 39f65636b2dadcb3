"""What a planning service tells of its jobs."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shardwright.client_errors import error_of_job
from shardwright.errors import ServiceError, ShardwrightError

if TYPE_CHECKING:
    from shardwright.planner.search import Progress


class _Resource(BaseModel):
    # A newer server may tell more.
    model_config = ConfigDict(extra="ignore", frozen=True)

    @classmethod
    def read(cls, data: Any) -> Self:
        """A resource from the server's JSON.

        Raises:
          ServiceError: it is none.
        """
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            first = error.errors()[0]
            raise ServiceError(
                f"the server's answer is not understood at {'.'.join(map(str, first['loc']))}: "
                f"{first['msg']}",
                kind="foreign",
                where="client",
                do="Use a client and a server of the same version",
            ) from None


class Job(_Resource):
    """A plan that was asked for, and how far it is.

    Attributes:
      id: of the plan.
      status: "queued", "running", "succeeded", "failed" or "cancelled".
      request: as the server understood it.
      progress: stage, meshes tried, best step time in seconds...
      summary: step time, peak memory and the like, once it has succeeded.
      problem: why it failed, as the server tells it.
    """

    id: str
    status: Literal["queued", "running", "succeeded", "failed", "cancelled"]
    created_at: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    request: dict[str, Any] = Field(default_factory=dict)
    progress: dict[str, Any] | None = None
    summary: dict[str, Any] | None = None
    problem: dict[str, Any] | None = Field(default=None, alias="error")

    @property
    def finished(self) -> bool:
        """Whether it has come to an end, good or bad."""
        return self.status not in ("queued", "running")

    @property
    def error(self) -> ShardwrightError | None:
        """Why there is no result; None while there may be one."""
        if self.status == "cancelled":
            return ServiceError(
                "it was cancelled", kind="cancelled", where=self.id, do="Ask for it again"
            )
        return error_of_job(self.problem, self.id) if self.status == "failed" else None


class Evaluation(_Resource):
    """The price of a sharding; `estimate` is JSON of an `EstimateModel`."""

    estimate: dict[str, Any]


class JobPage(_Resource):
    """Some of the plans, newest first.

    Attributes:
      items: the plans.
      next_cursor: for the next page; None on the last.
    """

    items: list[Job]
    next_cursor: str | None = None


class ComparedSlice(Job):
    """The plan of one slice of a comparison."""

    id: str = Field(alias="plan")
    topology: str


class Comparison(_Resource):
    """A comparison: one row a slice, in the order asked."""

    id: str
    rows: list[ComparedSlice]


class Uploaded(_Resource):
    """A program that the server has."""

    id: str
    status: Literal["inspecting", "ready", "invalid"] = "ready"
    problem: dict[str, Any] | None = Field(default=None, alias="error")


def progress_of(data: Mapping[str, Any]) -> Progress:
    """What a local search would tell `on_progress`."""
    from shardwright.planner.search import Progress

    best = data.get("best_step_s")
    return Progress(
        stage=str(data.get("stage") or ""),
        meshes_tried=int(data.get("meshes_tried") or 0),
        meshes=int(data.get("meshes") or 0),
        best_step_s=None if best is None else float(best),
        message=str(data.get("message") or ""),
    )
