"""What the dispatcher asks of whatever runs jobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

FailureKind = Literal[
    "input", "does-not-fit", "out-of-memory", "time-limit", "crashed", "internal", "lost"
]
_TITLES: dict[FailureKind, str] = {
    "input": "The request cannot be planned as it is",
    "does-not-fit": "No sharding fits in the memory of the slice",
    "out-of-memory": "The job needed more memory than it may use",
    "time-limit": "The job took longer than it may",
    "crashed": "The process that ran the job crashed",
    "internal": "A fault of Shardwright itself",
    "lost": "The machine that ran the job is gone",
}


@dataclass(frozen=True)
class Task:
    """A job as an engine gets it.

    Attributes:
      id: of this attempt at the job; unique.
      kind: "plan", "evaluate" or "inspect".
      request: what was asked.
      program: the uploaded program on this machine; None where the request names a model.
      out: an empty folder of this machine for the files of the result.
    """

    id: str
    kind: str
    request: Mapping[str, Any] = field(repr=False)
    program: Path | None
    out: Path


@dataclass(frozen=True)
class Limits:
    """What a worker may use for one job.

    Attributes:
      memory_bytes: resident memory of the worker and its children.
      seconds: wall time.
    """

    memory_bytes: int
    seconds: float


@dataclass(frozen=True)
class JobFailure:
    """Why a task failed, as people are told it.

    Attributes:
      what, where, do: what was wrong, where, and what to do about it.
      least_bytes, limit_bytes: of one device, where no sharding fits; as of a `DoesNotFitError`.
    """

    kind: FailureKind
    what: str
    where: str = ""
    do: str = ""
    least_bytes: float | None = None
    limit_bytes: float | None = None

    @property
    def may_be_retried(self) -> bool:
        """Another attempt may go better: nothing says that the job itself is at fault."""
        return self.kind in ("crashed", "lost")

    def as_error(self) -> dict[str, Any]:
        """The failure as a job keeps it."""
        detail = f"{self.where}: {self.what}" if self.where else self.what
        error: dict[str, Any] = {
            "kind": self.kind,
            "title": _TITLES[self.kind],
            "detail": f"{detail.rstrip('.')}. {self.do.rstrip('.')}.".replace(" .", ""),
            "what": self.what,
            "where": self.where,
            "do": self.do,
        }
        if self.kind == "does-not-fit":
            error |= {"least_bytes": self.least_bytes, "limit_bytes": self.limit_bytes}
        return error


@dataclass(frozen=True)
class Progressed:
    """How far a task is: stage, meshes_tried, meshes, best_step_s, gap, message."""

    task_id: str
    progress: Mapping[str, Any]


@dataclass(frozen=True)
class Succeeded:
    """A task is done.

    Attributes:
      summary: what lists show of the result; of an inspection, all that was found.
      files: names of the files in the task's folder.
      stage_seconds: wall time of each stage.
    """

    task_id: str
    summary: Mapping[str, Any]
    files: tuple[str, ...]
    stage_seconds: Mapping[str, float]


@dataclass(frozen=True)
class Failed:
    """A task failed."""

    task_id: str
    failure: JobFailure


Report = Progressed | Succeeded | Failed


class Engine(Protocol):
    """Runs tasks, each in a process of its own with limits.

    One thread calls everything but `wake`. Every task that was submitted is reported on once, as
    `Succeeded` or `Failed`, unless it is cancelled.
    """

    def start(self) -> None:
        """Begins to make workers; returns at once.

        Raises:
          InputError: what it runs on is not there.
        """

    def free(self) -> int:
        """How many tasks would start at once now."""

    def submit(self, task: Task) -> None:
        """Starts a task; only while `free` is above 0."""

    def cancel(self, task_id: str) -> None:
        """Ends a task, without a report; its worker is killed. Unknown ids are ignored."""

    def poll(self, timeout_s: float) -> list[Report]:
        """Waits until there is something to report, or `wake` is called, or the time is over."""

    def wake(self) -> None:
        """Ends a `poll` early; may be called from any thread."""

    def stop(self) -> None:
        """Kills every worker."""

    def trouble(self) -> str:
        """Why no worker can be had, in one line for the operator; empty where all is well."""
