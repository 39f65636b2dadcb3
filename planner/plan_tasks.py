"""Planning as a task that another process can do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from shardwright.planner.plan_schema import PlanModel
from shardwright.planner.workers import Task

if TYPE_CHECKING:
    from shardwright.hardware_profiles.chip import ChipProfile
    from shardwright.planner.program import Program
    from shardwright.planner.search import Progress

Pins = Mapping[str, Sequence[Any]]
"""Path or source line -> a sharding with an entry a dimension, as `plan` takes it."""


@dataclass(frozen=True)
class PlanTask:
    """What one call of `plan` is given; see there."""

    program: Program
    topology: str
    mesh: Mapping[str, int] | None = None
    pinned: Pins = field(default_factory=dict)
    memory_fraction: float = 0.9
    time_limit_s: float = 12.0
    seed: int = 0
    model_flops: float | None = None
    chip: ChipProfile | None = None
    name: str | None = None
    tokens_per_step: float | None = None

    def as_task(self) -> Task:
        """For another process.

        Pytrees and kernels may hold classes and functions that do not pickle, and planning needs
        none: they stay here, and `with_trees` puts the trees back. A chip's profile goes as text.
        """
        bare = replace(self.program, in_tree=None, out_tree=None, kernel_calls=())
        profile = None if self.chip is None else self.chip.model_dump_json()
        payload = (replace(self, program=bare, chip=None), profile)
        return Task("shardwright.planner.plan_tasks:run", payload)


def run(payload: tuple[PlanTask, str | None], report: Callable[[Progress], None]) -> PlanModel:
    """Plans in a worker what `PlanTask.as_task` sent.

    Raises:
      ShardwrightError: as `plan` does.
    """
    from shardwright.hardware_profiles.chip import parse_chip
    from shardwright.planner.planning import plan

    task, profile = payload
    return plan(
        task.program,
        topology=task.topology,
        mesh=task.mesh,
        pinned=task.pinned,
        memory_fraction=task.memory_fraction,
        time_limit_s=task.time_limit_s,
        seed=task.seed,
        model_flops=task.model_flops,
        chip=None if profile is None else parse_chip(profile),
        name=task.name,
        tokens_per_step=task.tokens_per_step,
        on_progress=report,
    ).data


def with_trees(plan: PlanModel, program: Program) -> PlanModel:
    """A plan that was made without the pytrees of its program, with them."""
    from shardwright.planner.plan_data import tree_text

    trees = {"in_tree": tree_text(program.in_tree), "out_tree": tree_text(program.out_tree)}
    return plan.model_copy(update={"program": plan.program.model_copy(update=trees)})
