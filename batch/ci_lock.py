"""What was planned when the lock was last updated: `shardwright.lock.json`."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from shardwright.errors import InputError
from shardwright.planner.plan_schema import PlanModel

_VERSION = 1

Sharding = list[list[str]]
"""For each dimension, the mesh axes that shard it with their sizes: [["data=16"], []]."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Inputs(_Model):
    """Everything that a plan follows from; equal inputs need no new plan."""

    program: str
    chip: str
    versions: dict[str, str]
    options: dict[str, Any]

    @property
    def digest(self) -> str:
        """First 16 hexadecimal digits of the SHA-256 of all of it."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class StateTensor(_Model):
    """A tensor of saved state."""

    type: str
    sharding: Sharding


class Entry(_Model):
    """One job on one slice as it was planned."""

    inputs: Inputs
    mesh: dict[str, int]
    step_time_s: float
    compute_time_s: float
    exposed_collective_time_s: float
    peak_memory_bytes: float
    memory_capacity_bytes: float
    mfu: float
    state: dict[str, StateTensor]


class Lock(_Model):
    """The whole lock: "job@slice" -> what was planned."""

    version: int = _VERSION
    entries: dict[str, Entry] = {}


def entry_of(plan: PlanModel, inputs: Inputs, state_paths: AbstractSet[str]) -> Entry:
    """A finished plan as it is locked.

    Args:
      state_paths: paths of the arguments that are saved state.
    """
    estimate, sizes = plan.estimate, plan.mesh_axes
    return Entry(
        inputs=inputs,
        mesh=dict(sizes),
        step_time_s=estimate.step_time_s,
        compute_time_s=estimate.compute_time_s,
        exposed_collective_time_s=estimate.exposed_collective_time_s,
        peak_memory_bytes=estimate.peak_memory_bytes,
        memory_capacity_bytes=estimate.memory_capacity_bytes,
        mfu=estimate.mfu,
        state={
            tensor.path: StateTensor(
                type=f"{tensor.dtype}{tensor.shape}",
                sharding=[[f"{axis}={sizes[axis]}" for axis in dim] for dim in tensor.spec],
            )
            for tensor in plan.program.inputs
            if tensor.path in state_paths
        },
    )


def load_lock(path: Path) -> Lock | None:
    """Reads a lock; None where there is none yet.

    Raises:
      InputError: it cannot be read, or is no lock of this version.
    """
    again = "Write it again with `shardwright ci update`"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InputError(f"the lock cannot be read ({error})", where=str(path), do=again) from None
    version = raw.get("version") if isinstance(raw, dict) else None
    if version != _VERSION:
        raise InputError(
            f"the lock has version {version} and this Shardwright reads {_VERSION}",
            where=str(path),
            do=again,
        )
    try:
        return Lock.model_validate(raw)
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(map(str, fault["loc"]))
        raise InputError(
            f"the lock is damaged at {key}: {fault['msg']}", where=str(path), do=again
        ) from None


def save_lock(lock: Lock, path: Path) -> None:
    """Writes a lock, whole or not at all, in an order that keeps its differences small."""
    ordered = lock.model_dump(mode="json")
    ordered["entries"] = dict(sorted(ordered["entries"].items()))
    new = path.with_name(path.name + ".new")
    try:
        new.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
        os.replace(new, path)
    except OSError as error:
        raise InputError(
            f"the lock cannot be written ({error.strerror})", where=str(path), do="Check its path"
        ) from None
