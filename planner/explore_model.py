"""An exploration of hypothetical hardware as data, and its Pareto front."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from shardwright.errors import InputError
from shardwright.planner.explore_space import MEANINGS, RESOURCES, TORUS
from shardwright.planner.plan_schema import Unit

STEP_TIME, CHIPS, MEMORY_USED = "step_time", "chips", "memory_used"
_FELT = 0.005
"""Change of the step time, in percent, from which on a resource binds."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SeedModel(_Model):
    """A plan without its chip: it is priced on any with the same torus."""

    mesh: dict[str, Any]
    choices: list[int]


class PointModel(_Model):
    """The workload on one hypothetical slice."""

    values: dict[str, float | str] = Field(description="knob -> multiple of the base, or the torus")
    torus: str = Field(description="shape in chips")
    wraps: list[bool] = Field(description="dimensions that close into rings")
    chips: int
    resources: dict[str, float] = Field(
        description="what a chip has of each resource, as a multiple of the base's chip"
    )
    status: Literal["planned", "does-not-fit", "failed"]
    message: str = ""
    step_time_s: float | None = None
    compute_time_s: float | None = None
    exposed_collective_time_s: float | None = None
    peak_memory_bytes: float | None = None
    memory_limit_bytes: float | None = None
    mfu: float | None = None
    mesh: str = ""
    sensitivity: dict[str, float] = Field(
        default={},
        description="percent by which the step changes with 1 % more of a resource, the plan kept",
    )
    seed: SeedModel | None = None
    compared: int = Field(
        default=0, description="plans found for points of its torus that were all priced here"
    )

    @property
    def planned(self) -> bool:
        """Whether it has a plan."""
        return self.step_time_s is not None

    @property
    def binding(self) -> list[tuple[str, float]]:
        """The resources that hold the step up and by how many percent, most first."""
        felt = [(name, -change) for name, change in self.sensitivity.items() if change <= -_FELT]
        return sorted(felt, key=lambda one: -one[1])

    def measure(self, objective: str) -> float:
        """What is to be small, of a planned point: a time, chips, bytes, or a resource."""
        if objective == STEP_TIME:
            return self.step_time_s or 0.0
        if objective == CHIPS:
            return float(self.chips)
        if objective == MEMORY_USED:
            return self.peak_memory_bytes or 0.0
        return self.resources[objective]


class ExplorationModel(_Model):
    """A whole exploration.

    Attributes:
      base: the slice that all points are told against.
      vary: knob -> its values.
      minimise: the objectives of the front.
      points: in the order of the values.
      front: positions of the points that no other beats in one objective without being beaten in
        another, by step time.
    """

    name: str
    base: str
    unit: Unit
    tokens_per_step: float | None
    memory_fraction: float
    vary: dict[str, list[float | str]]
    minimise: list[str]
    points: list[PointModel]
    front: list[int]


def checked_objectives(given: Sequence[str] | None, points: Sequence[PointModel]) -> list[str]:
    """What the front minimises.

    By default the step time and each resource of which points have different amounts, and chips
    where these differ.

    Raises:
      InputError: an objective is not known.
    """
    if given is None:
        varied = [name for name in RESOURCES if len({p.resources[name] for p in points}) > 1]
        chips = [CHIPS] if len({p.chips for p in points}) > 1 else []
        return [STEP_TIME, *varied, *chips]
    check_names(given)
    return list(dict.fromkeys(given))


def check_names(objectives: Sequence[str]) -> None:
    """Refuses objectives that are none.

    Raises:
      InputError: one is not known, or there is none.
    """
    known = (STEP_TIME, MEMORY_USED, CHIPS, *RESOURCES)
    for name in objectives or ("nothing",):
        if name not in known:
            hint = "; the shape of the torus is no amount, chips is" if name == TORUS else ""
            raise InputError(
                f"{name!r} cannot be minimised{hint}",
                where="minimise",
                do=f"Use some of {', '.join(known)}",
            )


def pareto_front(points: Sequence[PointModel], objectives: Sequence[str]) -> list[int]:
    """Positions of the planned points that no other dominates, by step time.

    One point dominates another where it is smaller in one objective and larger in none. Of equal
    points the first counts.
    """
    measured = {
        place: tuple(point.measure(name) for name in objectives)
        for place, point in enumerate(points)
        if point.planned
    }
    first: dict[tuple[float, ...], int] = {}
    for place, measures in measured.items():
        first.setdefault(measures, place)
    front = [
        place
        for measures, place in first.items()
        if not any(
            other != measures and all(o <= m for o, m in zip(other, measures, strict=True))
            for other in first
        )
    ]
    return sorted(front, key=lambda place: (points[place].measure(STEP_TIME), measured[place]))


def objective_text(name: str) -> str:
    """What an objective is, in words."""
    told = {STEP_TIME: "step time", CHIPS: "chips", MEMORY_USED: "memory used a device"}
    return told.get(name) or MEANINGS[name]
