"""What a plan says of where its program came from, so that other commands find it again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwright.planner.plan_schema import OriginModel, PlanModel, Unit


def with_origin(
    plan: PlanModel,
    target: str,
    *,
    args: str | None = None,
    variant: str | None = None,
    options: Mapping[str, Any] | None = None,
    unit: Unit = "tokens",
) -> PlanModel:
    """A plan that tells its program's origin.

    Args:
      target: a reference model, "module:function", a file's path, or "module:name" of variants.
      args: "module:name" of a function's arguments.
      variant: the form that was planned, of variants.
      options: those given of a reference model.
      unit: what a step works on.
    """
    origin = OriginModel(target=target, args=args, variant=variant, options=dict(options or {}))
    program = plan.program.model_copy(update={"origin": origin, "unit": unit})
    return plan.model_copy(update={"program": program})
