"""Shardwright plans the sharding of JAX programs on TPU slices.

    import shardwright as sw

    plan = sw.plan(train_step, state, batch, topology="v5e:16x16", donate_argnums=(0,))
    step = plan.jit(train_step)

Names are loaded when first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardwright.errors import DoesNotFitError, InputError, ServiceError, ShardwrightError
from shardwright.version import VERSION as __version__

if TYPE_CHECKING:
    from shardwright.client import AsyncClient, Client
    from shardwright.cost_models.algorithms import register_collective
    from shardwright.cost_models.torus import Line
    from shardwright.hardware_profiles.chip import register_chip
    from shardwright.models.flash_attention import flash_attention
    from shardwright.models.pipeline import pipeline
    from shardwright.planner.comparison import compare
    from shardwright.planner.explore import explore
    from shardwright.planner.hand_made import evaluate
    from shardwright.planner.kernel_ops import register_op
    from shardwright.planner.kernels import kernel
    from shardwright.planner.plan import Plan
    from shardwright.planner.planning import plan
    from shardwright.planner.program import Program
    from shardwright.planner.rules import register_rule
    from shardwright.planner.variants import Variant
    from shardwright.planner.verification import verify

_HOMES = {
    "AsyncClient": "shardwright.client",
    "Client": "shardwright.client",
    "compare": "shardwright.planner.comparison",
    "Plan": "shardwright.planner.plan",
    "Program": "shardwright.planner.program",
    "evaluate": "shardwright.planner.hand_made",
    "explore": "shardwright.planner.explore",
    "flash_attention": "shardwright.models.flash_attention",
    "Line": "shardwright.cost_models.torus",
    "kernel": "shardwright.planner.kernels",
    "pipeline": "shardwright.models.pipeline",
    "plan": "shardwright.planner.planning",
    "register_chip": "shardwright.hardware_profiles.chip",
    "register_collective": "shardwright.cost_models.algorithms",
    "register_op": "shardwright.planner.kernel_ops",
    "register_rule": "shardwright.planner.rules",
    "Variant": "shardwright.planner.variants",
    "verify": "shardwright.planner.verification",
}

__all__ = [
    "AsyncClient",
    "Client",
    "DoesNotFitError",
    "InputError",
    "Line",
    "Plan",
    "Program",
    "ServiceError",
    "ShardwrightError",
    "Variant",
    "__version__",
    "compare",
    "evaluate",
    "explore",
    "flash_attention",
    "kernel",
    "pipeline",
    "plan",
    "register_chip",
    "register_collective",
    "register_op",
    "register_rule",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
