"""What libtpu made of annotated programs, kept in the user's cache folder.

A compiled program is found again by its module without source locations, its slice, mesh, compiler
options and libtpu, so that a change to the cost models compiles nothing again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from shardwright.hardware_profiles.chip import parse_chip
from shardwright.hardware_profiles.slices import parse_slice
from shardwright.planner.annotated import annotated_stablehlo
from shardwright.planner.cache_folder import cache_folder
from shardwright.planner.compiling import check_libtpu, run_compiler, tpu_job
from shardwright.planner.plan import Plan
from shardwright.planner.program import Program

_REFUSAL = "refused.txt"


@dataclass(frozen=True)
class Compiled:
    """What the TPU compiler made of a program.

    Attributes:
      hlo: text of the scheduled module.
      result: seconds of compiling, and bytes of memory, as `verification` takes them.
      refused: what the compiler said where it found no room; then there is no module.
    """

    hlo: str = field(repr=False)
    result: dict[str, Any]
    refused: str = ""


def is_compiled(plan: Plan, program: Program) -> bool:
    """Whether `compiled_for_tpu` finds what was made before."""
    text = annotated_stablehlo(program, plan, keep_unknown=False)
    return (cache_folder("compiled") / _key(text, plan)).exists()


def compiled_for_tpu(plan: Plan, program: Program, time_limit_s: float = 1800.0) -> Compiled:
    """Compiles a program under a plan with libtpu, or takes what it made of the same before.

    Raises:
      InputError: libtpu is not installed, or the plan is of another program.
      ShardwrightError: the compiler failed for another reason than memory, or took too long.
    """
    check_libtpu("compile")
    text = annotated_stablehlo(program, plan, keep_unknown=False)
    kept = cache_folder("compiled") / _key(text, plan)
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent, prefix="making-") as made:
            folder = Path(made)
            (folder / "annotated.mlir").write_text(text)
            on = parse_slice(plan.data.topology, parse_chip(plan.data.chip))
            (folder / "job.json").write_text(json.dumps(tpu_job(plan, on)))
            refused = run_compiler(folder, "tpu", on.devices, time_limit_s)
            if refused is not None:
                (folder / _REFUSAL).write_text(refused)
            _keep(folder, kept)
    refusal = kept / _REFUSAL
    if refusal.exists():
        return Compiled("", {}, refusal.read_text())
    result = json.loads((kept / "result.json").read_text())
    return Compiled((kept / "compiled.hlo").read_text(), result)


def _keep(folder: Path, kept: Path) -> None:
    """Puts what was made where it is found again, all at once."""
    whole = Path(tempfile.mkdtemp(dir=kept.parent, prefix="made-"))
    try:
        shutil.copytree(folder, whole, dirs_exist_ok=True)
        os.rename(whole, kept)
    except FileExistsError:
        pass
    except OSError:  # made by another process meanwhile: a folder that is not empty
        if not kept.exists():
            raise
    finally:
        shutil.rmtree(whole, ignore_errors=True)


def _key(text: str, plan: Plan) -> str:
    module = [line.split(" loc(")[0] for line in text.splitlines() if line[:1] != "#"]
    about = [
        plan.data.topology,
        json.dumps(plan.data.mesh, sort_keys=True),
        json.dumps(plan.compiler_options, sort_keys=True),
        metadata.version("libtpu"),
    ]
    return hashlib.sha256("\n".join([*module, *about]).encode()).hexdigest()[:24]
