"""Every system that one planner takes the place of, a row each: its paper's sharding and ours.

    python benchmarks/systems.py [--rows WORD ...] [--time-limit SECONDS] [--compile] [--folder DIR]

The rows are those of `system_rows.py`; `--rows` takes those with one of the words in their name. A
paper's sharding is priced by `sw.evaluate` on the paper's mesh, laid on the slice in its best way,
with the paper's annotations on arguments and on activations. Ours is `sw.plan` of the same model
and slice without any annotation, its mesh searched. The claim: it fits, and takes at most as long.
Where that fails, the row says LOST.

`--compile` compiles the planned programs with libtpu (minutes each; needs the `tpu` extra, no TPU),
and puts the collectives of the compiled program beside the predicted ones. What was compiled stays
in DIR.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from jax.sharding import PartitionSpec
from system_rows import SYSTEMS, System

import shardwright as sw
from shardwright.models.choices import model_variants
from shardwright.models.config import configured, is_config, read_config
from shardwright.models.registry import ReferenceModel, build
from shardwright.planner.plan_schema import EstimateModel
from shardwright.planner.variants import Variant
from shardwright.planner.verification_report import Verification

MEMORY_FRACTION = 0.9
NOT_WORSE = 1.0005
"""Steps that differ by less than this count as equally long."""

HEADER = (
    "| system | model | slice | paper's sharding, mesh | step ms | GB | our mesh | step ms | GB "
    "| ours / paper's | planning s |\n" + "|---" * 11 + "|"
)


@dataclass(frozen=True)
class Row:
    """A system with both prices."""

    system: System
    parameters: int
    paper: EstimateModel
    plan: sw.Plan | None
    problem: str
    seconds: float

    @property
    def paper_fits(self) -> bool:
        """Whether the paper's sharding keeps within the memory."""
        limit = self.paper.memory_capacity_bytes * MEMORY_FRACTION
        return self.paper.peak_memory_bytes <= limit

    @property
    def ratio(self) -> float | None:
        """Step time of the plan over that of the paper's sharding."""
        if self.plan is None:
            return None
        return self.plan.estimate.step_time_s / self.paper.step_time_s

    @property
    def lost(self) -> bool:
        """Whether the claim fails: ours does not fit, or takes longer than a paper's that fits."""
        return self.ratio is None or (self.paper_fits and self.ratio > NOT_WORSE)

    def text(self) -> str:
        """The row of the table."""
        system = self.system
        size = f"{sized(system, {})[0]}, {self.parameters / 1e9:.3g}B"
        fits = "" if self.paper_fits else ", does not fit"
        head = (
            f"| {system.name} | {size} | {system.topology} | {system.paper}: "
            f"{axes(system.hand.mesh)} | {_cells(self.paper)}{fits}"
        )
        if self.plan is None:
            return f"{head} | {self.problem} | | | **LOST** | {self.seconds:.0f} |"
        form = f"{self.plan.data.variant}: " if self.plan.data.variant else ""
        verdict = f"LOST: {self.ratio:.3f}" if self.lost else f"{self.ratio:.3f}"
        return (
            f"{head} | {form}{axes(self.plan.mesh_axes)} | {_cells(self.plan.estimate)} "
            f"| **{verdict}** | {self.seconds:.0f} |"
        )


def axes(mesh: dict[str, int]) -> str:
    """A mesh as people write it."""
    return " x ".join(f"{name} {size}" for name, size in mesh.items())


def _cells(estimate: EstimateModel) -> str:
    return f"{estimate.step_time_s * 1e3:.4g} | {estimate.peak_memory_bytes / 1e9:.2f}"


def evaluate_paper(system: System) -> EstimateModel:
    """The price of a paper's sharding."""
    model = built(system, system.hand.options)
    return sw.evaluate(
        model.train_step,
        *model.example_args,
        topology=system.topology,
        mesh=system.hand.mesh,
        in_specs=specs_of(system, model),
        donate_argnums=model.donate_argnums,
    )


def sized(system: System, more: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The name of a system's reference model and its options."""
    options = system.options | more
    if not is_config(system.model):
        return system.model, options
    config = read_config(Path(__file__).with_name(system.model))
    return config.base, configured(config, options)


def built(system: System, more: Mapping[str, Any]) -> ReferenceModel:
    """A system's model with more options."""
    name, options = sized(system, more)
    return build(name, **options)


def specs_of(system: System, model: ReferenceModel) -> Any:
    """A paper's shardings in the pytree of the arguments."""
    flat, tree = jax.tree_util.tree_flatten_with_path(model.example_args)
    paths = [jax.tree_util.keystr(path) for path, _ in flat]
    shapes = [leaf.shape for _, leaf in flat]
    specs = system.hand.specs(paths, shapes, system.hand.mesh)
    return tree.unflatten([PartitionSpec(*spec) for spec in specs])


def run(system: System, time_limit_s: float) -> Row:
    """Prices a system both ways."""
    paper = evaluate_paper(system)
    model = built(system, {})
    began, plan, problem = time.perf_counter(), None, ""
    try:
        plan = make_plan(system, model, time_limit_s)
    except sw.DoesNotFitError as error:
        problem = error.what
    seconds = time.perf_counter() - began
    return Row(system, model.parameter_count, paper, plan, problem, seconds)


def make_plan(system: System, model: ReferenceModel, time_limit_s: float) -> sw.Plan:
    """The plan of a system's model, of the best of its forms where it has several.

    Raises:
      DoesNotFitError: nothing fits.
    """
    given: dict[str, Any] = {
        "topology": system.topology,
        "memory_fraction": MEMORY_FRACTION,
        "time_limit_s": time_limit_s,
        "name": model.name,
    }
    if system.choices:
        return sw.plan(variants=forms(system), **given)
    return sw.plan(model.step, *model.example_args, donate_argnums=model.donate_argnums, **given)


def forms(system: System) -> dict[str, Variant]:
    """The forms of a system's model that are planned together."""
    return model_variants(*sized(system, {}), system.choices)


def compiled(row: Row, folder: Path) -> Verification:
    """The planned program as libtpu compiles it.

    Raises:
      ShardwrightError: the compiler failed.
    """
    assert row.plan is not None
    variant = row.plan.data.variant
    chosen = forms(row.system)[variant].options if variant else {}
    model = built(row.system, chosen)
    name = "".join(c if c.isalnum() else "-" for c in row.system.name)
    return sw.verify(row.plan, model.step, *model.example_args, keep=folder / name)


COMPILED_HEADER = (
    "| system | collective | over | predicted MB | runs | compiled MB | runs |\n"
    + "|---" * 7 + "|"
)  # fmt: skip
_LEAST_BYTES = 1e6


def compiled_rows(name: str, found: Verification) -> Iterator[str]:
    """The collectives of a compiled program, those above 1 MB, and the memory."""
    for line in found.collectives:
        if max(line.predicted_bytes, line.compiled_bytes) < _LEAST_BYTES:
            continue
        yield (
            f"| {name} | {line.kind} | {' x '.join(line.axes)} | {line.predicted_bytes / 1e6:.1f} "
            f"| {line.predicted_runs:.0f} | {line.compiled_bytes / 1e6:.1f} "
            f"| {line.compiled_runs:.0f} |"
        )
    memory = found.memory
    peak = memory.compiled_peak or memory.compiled_used
    yield (
        f"| {name} | *peak memory* | | {memory.predicted_peak / 1e6:.0f} | | {peak / 1e6:.0f} | |"
    )


def main() -> None:
    """Prices, plans and prints the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", default=[""], help="words in the names of the rows")
    parser.add_argument("--time-limit", type=float, default=20.0, help="seconds a plan")
    parser.add_argument("--compile", action="store_true", help="compile the plans with libtpu")
    parser.add_argument("--folder", type=Path, default=Path("systems"))
    given = parser.parse_args()
    asked = [s for s in SYSTEMS if any(word.lower() in s.name.lower() for word in given.rows)]
    rows = []
    print(HEADER, flush=True)
    for system in asked:
        rows.append(run(system, given.time_limit))
        print(rows[-1].text(), flush=True)
    if given.compile:
        print(f"\n{COMPILED_HEADER}", flush=True)
        for row in rows:
            _print_compiled(row, given.folder)
    lost = [row.system.name for row in rows if row.lost]
    print(f"\n{len(rows) - len(lost)} of {len(rows)} rows hold the claim.", *lost, sep="\nLOST: ")
    sys.exit(bool(lost))


def _print_compiled(row: Row, folder: Path) -> None:
    name = row.system.name
    if row.plan is None or not row.system.compiles:
        return
    try:
        lines: Sequence[str] = list(compiled_rows(name, compiled(row, folder)))
    except sw.ShardwrightError as error:
        lines = [f"| {name} | {error} | | | | | |"]
    print(*lines, sep="\n", flush=True)


if __name__ == "__main__":
    main()
