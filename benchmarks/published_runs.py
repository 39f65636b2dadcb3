"""Prices published training runs and compares with the step times that were measured.

    python benchmarks/published_runs.py [--only TEXT] [--plan SECONDS]

With --plan each run is also planned, and the plan compared with the sharding that was used.

Every run of `published_runs.json` is built with the reference decoder as it was trained (sizes,
batch, what was kept and offloaded for the backward pass, flash attention) and priced by
`sw.evaluate` with its own mesh and sharding, MaxText's. The runs' sources are in the file.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from jax.sharding import PartitionSpec

import shardwright as sw
from shardwright.errors import DoesNotFitError
from shardwright.models.registry import ReferenceModel, build

MEMORY_FRACTION = 0.9
_FILE = Path(__file__).with_name("published_runs.json")
_TENSOR = ("tensor",)
_RULES: dict[str, tuple[tuple[str, ...], ...]] = {
    "embedding": (_TENSOR, ("fsdp",)),
    "head": (("fsdp",), _TENSOR),
    "positions": ((), ("fsdp",)),
    "wq": (("fsdp",), _TENSOR, ()),
    "wk": (("fsdp",), _TENSOR, ()),
    "wv": (("fsdp",), _TENSOR, ()),
    "wo": (_TENSOR, (), ("fsdp",)),
    "bq": (_TENSOR, ()),
    "bk": (_TENSOR, ()),
    "bv": (_TENSOR, ()),
    "w_up": (("fsdp",), _TENSOR),
    "w_gate": (("fsdp",), _TENSOR),
    "w_down": (_TENSOR, ("fsdp",)),
    "b_up": (_TENSOR,),
    "router": (("fsdp",), ()),
}
"""Parameter -> the mesh axes of each of its last dimensions.

Source: AI-Hypercomputer/maxtext, `MaxText/configs/base.yml`, logical_axis_rules: "embed" over
  fsdp; "heads", "mlp" and "vocab" over tensor; norms and biases of the residual stream whole.
"""


@dataclass(frozen=True)
class Run:
    """One published run as it is in the file."""

    id: str
    family: str
    source: str
    notes: str
    measured_as: str
    step_s: float
    model: str
    options: dict[str, Any]
    topology: str
    mesh: dict[str, int]

    def build(self, **more: Any) -> ReferenceModel:
        """The run's model with its train step."""
        return build(self.model, **{"attention": "flash"} | self.options | more)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The mesh axes that the batch is cut over."""
        return tuple(axis for axis in ("data", "fsdp") if axis in self.mesh)


@dataclass(frozen=True)
class Priced:
    """A run with the estimate of its own sharding."""

    run: Run
    estimate: Any

    @property
    def error(self) -> float:
        """How much longer the predicted step is than the measured one, as a part."""
        return float(self.estimate.step_time_s / self.run.step_s - 1)


def read_runs() -> tuple[Run, ...]:
    """The runs of the file."""
    return tuple(Run(**run) for run in json.loads(_FILE.read_text(encoding="utf-8"))["runs"])


def state_specs(state: Any, mesh: Mapping[str, int]) -> Any:
    """PartitionSpecs of a decoder's train state, by `_RULES`."""

    def spec(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
        names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        rule = _RULES.get(names[-1], ()) if names else ()
        stacked = len(leaf.shape) - len(rule)
        if not rule or stacked < 0:
            return PartitionSpec()
        return PartitionSpec(
            *[None] * stacked, *(tuple(axis for axis in axes if axis in mesh) for axes in rule)
        )

    return jax.tree_util.tree_map_with_path(spec, state)


def price(run: Run) -> Priced:
    """Prices a run with the sharding that it used.

    The residual stream [batch, length, d_model] is cut over the batch's axes and, as in MaxText
    ("activation_embed"), over tensor.
    """
    tensor = "tensor" if "tensor" in run.mesh else None
    model = run.build(residual_axes=(run.batch_axes, None, tensor))
    estimate = sw.evaluate(
        model.train_step,
        *model.example_args,
        topology=run.topology,
        mesh=run.mesh,
        in_specs=(state_specs(model.example_args[0], run.mesh), PartitionSpec(run.batch_axes)),
        donate_argnums=model.donate_argnums,
        model_flops=model.model_flops_per_step,
    )
    return Priced(run, estimate)


@dataclass(frozen=True)
class Planned:
    """The planner's own plan for a run, or why there is none."""

    priced: Priced
    plan: Any
    no_plan: str

    def row(self) -> str:
        """The plan beside the sharding that was used."""
        head = f"| {self.priced.run.id} | {self.priced.estimate.step_time_s:.3f}"
        if self.plan is None:
            return f"{head} | | | | | {self.no_plan} |"
        estimate = self.plan.estimate
        mesh = " x ".join(f"{axis} {size}" for axis, size in self.plan.mesh_axes.items())
        ratio = estimate.step_time_s / self.priced.estimate.step_time_s
        slower = "" if ratio <= NOT_SLOWER else " SLOWER"
        return (
            f"{head} | {estimate.step_time_s:.3f} | {ratio:.3f}{slower} "
            f"| {estimate.compute_time_s:.2f} + {estimate.exposed_collective_time_s:.2f} "
            f"| {estimate.peak_memory_bytes / 1e9:.1f} | {mesh} |"
        )


NOT_SLOWER = 1.0005
PLAN_HEADER = (
    "| run | as run s | plan s | plan / as run | compute + exposed | peak GB | mesh |\n"
    + "|---" * 7
    + "|"
)


def make_plan(priced: Priced, seconds: float) -> Planned:
    """Plans a run, with all the memory there is where its own sharding is predicted to need it.

    Some are predicted to take even more: the loss of the reference decoder writes its logits in
    float32, MaxText's does not.
    """
    run = priced.run
    model = run.build()
    needed = priced.estimate.peak_memory_bytes / priced.estimate.memory_capacity_bytes
    try:
        plan = sw.plan(
            model.train_step,
            *model.example_args,
            topology=run.topology,
            donate_argnums=model.donate_argnums,
            memory_fraction=MEMORY_FRACTION if needed <= MEMORY_FRACTION else 1.0,
            time_limit_s=seconds,
            model_flops=model.model_flops_per_step,
        )
    except DoesNotFitError as error:
        return Planned(priced, None, error.what)
    return Planned(priced, plan, "")


HEADER = (
    "| run | slice | mesh | measured s | predicted s | error | compute | exposed | peak GB |\n"
    + "|---" * 9
    + "|"
)


def row(priced: Priced) -> str:
    """A run's row of the table."""
    run, estimate = priced.run, priced.estimate
    mesh = " x ".join(f"{axis} {size}" for axis, size in run.mesh.items())
    return (
        f"| {run.id} | {run.topology} | {mesh} | {run.step_s:.2f} | {estimate.step_time_s:.2f} "
        f"| {priced.error:+.1%} | {estimate.compute_time_s:.2f} "
        f"| {estimate.exposed_collective_time_s:.2f} | {estimate.peak_memory_bytes / 1e9:.1f} |"
    )


def out_of_order(priced: list[Priced]) -> Iterator[str]:
    """Pairs of runs of one family that are predicted in the other order than measured."""
    for one, other in itertools.combinations(priced, 2):
        same = one.run.family == other.run.family
        measured = one.run.step_s - other.run.step_s
        predicted = one.estimate.step_time_s - other.estimate.step_time_s
        if same and measured * predicted < 0:
            yield f"{one.run.id} and {other.run.id}"


def main() -> None:
    """Prices the runs and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="runs whose name holds this text")
    parser.add_argument(
        "--plan", type=float, default=0.0, metavar="SECONDS", help="plan the runs too, so long each"
    )
    given = parser.parse_args()
    priced = []
    print(HEADER)
    for run in read_runs():
        if given.only in run.id:
            priced.append(price(run))
            print(row(priced[-1]), flush=True)
    errors = [abs(p.error) for p in priced]
    print(f"\nmedian error {statistics.median(errors):.1%}, largest {max(errors):.1%}")
    wrong = list(out_of_order(priced))
    print(f"wrong order within a family: {'; '.join(wrong) or 'none'}")
    if given.plan:
        print("\n" + PLAN_HEADER)
        for one in priced:
            print(make_plan(one, given.plan).row(), flush=True)


if __name__ == "__main__":
    main()
