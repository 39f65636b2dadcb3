"""Compiling an annotated module, in a process of its own.

A program that a compiler cannot take may end the process, so nothing else runs in it.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

from shardwright.errors import InputError, ShardwrightError
from shardwright.hardware_profiles.slices import Slice
from shardwright.planner.plan import Plan

Compiler = Literal["tpu", "cpu"]

_OUT_OF_MEMORY = re.compile(
    r"(?:Used |HLO temporaries \()([\d.]+[KMG])(?: of |\) exceeds available HBM \()([\d.]+[KMG])",
    re.IGNORECASE,
)
"""How libtpu says that there is no room: once buffers have places, and before."""
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
_SHOWN_ERROR = 500
_HOST = (2, 2, 1)
"""Chips of a host, as libtpu takes them where it is not told."""


def check_libtpu(where: str) -> None:
    """Raises InputError where the TPU compiler is not installed."""
    if importlib.util.find_spec("libtpu") is None:
        raise InputError(
            "libtpu, the TPU compiler, is not installed",
            where=where,
            do="Install it with pip install 'shardwright[tpu]' (no TPU is needed)",
        )


def tpu_job(plan: Plan, on: Slice) -> dict[str, Any]:
    """What `compile_child` is told of a plan's slice, mesh and compiler options."""
    shape = "x".join(map(str, on.shape))
    chips = (*on.shape, 1, 1)[: len(_HOST)]
    return {
        "compiler": "tpu",
        "topology": f"{on.chip.name}:{shape}",
        # libtpu takes no slice that whole hosts do not make up: a smaller one is of a smaller host.
        "host": [math.gcd(most, size) for most, size in zip(_HOST, chips, strict=True)],
        "slices": on.count,
        # v4 chips show as one device each only where asked for.
        "megacore": on.chip.name == "v4",
        "mesh": plan.data.mesh,
        "chip": plan.data.chip,
        "compiler_options": plan.compiler_options,
    }


def run_compiler(folder: Path, compiler: Compiler, devices: int, time_limit_s: float) -> str | None:
    """Does the job in a folder: what the compiler said where it found no room, None where done.

    Raises:
      ShardwrightError: the compiler failed for another reason than memory, or took too long.
    """
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    if compiler == "tpu":
        environment |= {
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_WORKER_HOSTNAMES": "localhost",
        }
        environment.pop("XLA_FLAGS", None)
    else:
        environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    command = [sys.executable, "-m", "shardwright.planner.compile_child", str(folder)]
    try:
        child = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=time_limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ShardwrightError(
            f"the compiler was not done after {time_limit_s:.0f} s",
            where="verify",
            do="Give it more time (time_limit_s=), or verify fewer layers",
        ) from None
    if child.returncode == 0:
        return None
    said = _last_error(child.stderr)
    if (needed := refusal(child.stderr)) is not None:
        return needed
    if "RESOURCE_EXHAUSTED" in said:
        return said
    ended = f"exit code {child.returncode}"
    if child.returncode < 0:
        ended = signal.Signals(-child.returncode).name
    raise ShardwrightError(
        f"the {compiler} compiler failed ({ended}): {said}",
        where="verify",
        do="Look at the program's operations that it names; with keep= the annotated module stays",
    )


def _last_error(text: str) -> str:
    """The line of a process's stderr that says most of why it ended."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [
        line for line in lines if re.search(r"Error\b|Check failed|INTERNAL|EXHAUSTED", line)
    ]
    return (telling or lines or ["nothing was said"])[-1][:_SHOWN_ERROR]


def refusal(said: str) -> str | None:
    """What a program needs of what there is, by a compiler's message; None where it tells not."""
    match = _OUT_OF_MEMORY.search(said)
    return f"Used {match[1]} of {match[2]} hbm" if match else None


def bytes_used(said: str) -> float:
    """The memory that a program wants by a compiler's message; NaN where it does not say."""
    match = _OUT_OF_MEMORY.search(said)
    return float(match[1][:-1]) * _UNITS[match[1][-1].upper()] if match else math.nan
