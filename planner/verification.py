"""Step 8: a plan judged by a compiler.

The annotated program is compiled for the planned slice in a process of its own, and what the plan
predicts is put beside what was compiled: collectives, memory and time; on CPU also the numbers.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np

from shardwright.errors import InputError
from shardwright.hardware_profiles.chip import parse_chip
from shardwright.hardware_profiles.slices import parse_slice
from shardwright.planner import mlir
from shardwright.planner.annotated import annotated_stablehlo
from shardwright.planner.compiled import CompiledCollective, module_collectives, slice_positions
from shardwright.planner.compiled_kernels import (
    KernelComparison,
    compare_kernels,
    explain_kernels,
    seconds_by_line,
)
from shardwright.planner.compiled_memory import compiled_peak
from shardwright.planner.compiled_schedule import compiled_time
from shardwright.planner.compiling import (
    Compiler,
    bytes_used,
    check_libtpu,
    run_compiler,
    tpu_job,
)
from shardwright.planner.hlo import HloModule, parse_hlo
from shardwright.planner.kernel_lowering import place_kernels
from shardwright.planner.plan import Plan, abstract
from shardwright.planner.prints import erase_prints
from shardwright.planner.program import Program
from shardwright.planner.tracing import in_mesh
from shardwright.planner.verification_report import (
    MemoryComparison,
    OutputComparison,
    TimeComparison,
    Verification,
    axes_across,
    compare_collectives,
    compare_operations,
    explain,
    shown_buffers,
)

_MOST_CPU_BYTES = 2e9


def verify(
    plan: Plan,
    fn: Callable[..., Any] | Program,
    *args: Any,
    compiler: Compiler = "tpu",
    time_limit_s: float = 1800.0,
    keep: str | Path | None = None,
) -> Verification:
    """Compiles a program under its plan, and compares it with what the plan predicts.

    Args:
      plan: the plan of this program.
      fn: the function that was planned, of `args`, or the `Program`.
      args: arrays or `jax.ShapeDtypeStruct`s, as they were planned. On CPU, arrays are what the
        program is run with, and values are made up where there are none.
      compiler: "tpu" compiles for the planned slice with libtpu, which needs no TPU; a minute or
        more for a large model. "cpu" compiles for as many devices of the host, runs the program on
        them and on one, and compares the results.
      time_limit_s: seconds after which the compiler is stopped.
      keep: a folder to which the annotated module and the compiled HLO are written.

    Raises:
      InputError: the plan is of another program, libtpu is not installed, or the program is too
        large to run on CPU.
      ShardwrightError: the compiler failed for another reason than memory, or took too long.
    """
    if not isinstance(plan, Plan):
        raise InputError(
            f"{plan!r} is no plan", where="verify", do="Make one with plan, or Plan.load(path)"
        )
    program = _planned_program(plan, fn, args)
    on = parse_slice(plan.data.topology, parse_chip(plan.data.chip))
    if compiler == "tpu":
        check_libtpu("verify")
    elif compiler != "cpu":
        raise InputError(
            f"there is no compiler {compiler!r}", where="verify", do='Use "tpu" or "cpu"'
        )
    with tempfile.TemporaryDirectory(prefix="shardwright-") as made:
        folder = Path(made) if keep is None else Path(keep)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "annotated.mlir").write_text(
            annotated_stablehlo(program, plan, compiler, keep_unknown=False)
        )
        job = tpu_job(plan, on) if compiler == "tpu" else _cpu_job(plan, program, args, folder)
        (folder / "job.json").write_text(json.dumps(job))
        failure = run_compiler(folder, compiler, on.devices, time_limit_s)
        if failure is not None:
            return _without_program(plan, compiler, failure)
        result = json.loads((folder / "result.json").read_text())
        hlo = (folder / "compiled.hlo").read_text()
    return verification(plan, hlo, result, compiler)


def verification(plan: Plan, hlo: str, result: dict[str, Any], compiler: Compiler) -> Verification:
    """Puts a plan beside the HLO text that was compiled, and what the executable says of itself.

    Args:
      result: `seconds` of compiling; `memory` of the executable, in bytes: arguments, outputs,
        aliased, temporaries, peak; `differences` of the results, where the program was run.
    """
    module = parse_hlo(hlo)
    on = plan.logical_mesh
    found = module_collectives(module, slice_positions(on) if compiler == "tpu" else None)
    mesh = plan.mesh_axes
    memory = _memory(plan, module, result["memory"], compiler)
    rows = compare_collectives(plan.estimate, found, mesh, axes_across(on))
    paths = [tensor.path for tensor in plan.data.program.outputs]
    differences = result.get("differences", [])
    kernels, notes = _kernels(plan, module) if compiler == "tpu" else ([], [])
    return Verification(
        **_about(plan, compiler),
        compile_seconds=result["seconds"],
        fits=True,
        problem="",
        collectives=rows,
        operations=compare_operations(plan.estimate, found, mesh, axes_across(on)),
        memory=memory,
        time=_time(plan, module if compiler == "tpu" else None),
        kernels=kernels,
        outputs=[
            OutputComparison(path=path, difference=difference)
            for path, difference in zip(paths, differences, strict=bool(differences))
        ],
        notes=[*explain(rows, memory), *_together(found), *notes],
    )


def _about(plan: Plan, compiler: Compiler) -> dict[str, Any]:
    version = f"libtpu {metadata.version('libtpu')}" if compiler == "tpu" else ""
    return {
        "program": plan.data.program.name,
        "topology": plan.data.topology,
        "mesh_axes": plan.mesh_axes,
        "compiler": compiler,
        "compiler_version": version or f"jaxlib {jaxlib.__version__}",
    }


def _memory(
    plan: Plan, module: HloModule, told: dict[str, float], compiler: Compiler
) -> MemoryComparison:
    buffers = []
    if compiler == "tpu":  # on CPU nothing says which buffers stay in place
        for b in compiled_peak(module).buffers:
            names = (b.array, b.op_name and f"of {b.op_name}", b.source and f"at {b.source}")
            buffers.append((" ".join(filter(None, names)) or b.name, b.nbytes))
    used = told["arguments"] + told["temporaries"] + told["outputs"] - told["aliased"]
    return MemoryComparison(
        predicted_peak=plan.estimate.peak_memory_bytes,
        # Of small programs libtpu tells a peak above all that they use.
        compiled_peak=min(told["peak"], used) or None,
        compiled_used=used,
        arguments=told["arguments"],
        temporaries=told["temporaries"],
        outputs=told["outputs"],
        aliased=told["aliased"],
        predicted_buffers=list(plan.estimate.peak_buffers),
        compiled_buffers=shown_buffers(buffers),
    )


def _time(plan: Plan, module: HloModule | None) -> TimeComparison:
    estimate = plan.estimate
    time = None if module is None else compiled_time(module, plan.logical_mesh)
    return TimeComparison(
        predicted_step=estimate.step_time_s,
        predicted_compute=estimate.compute_time_s,
        predicted_collectives=estimate.collective_time_s,
        compiled_step=None if time is None else time.step_s,
        compiled_compute=None if time is None else time.compute_s,
        compiled_collectives=None if time is None else time.collective_s,
    )


def _kernels(plan: Plan, module: HloModule) -> tuple[list[KernelComparison], list[str]]:
    """Kernels by line, and what is to be told of them."""
    clock = plan.logical_mesh.slice.chip.clock_hz.value
    rows = compare_kernels(plan.estimate, seconds_by_line(module, clock))
    notes = list(explain_kernels(rows, plan.mesh_axes, module, clock))
    if unknown := compiled_time(module, plan.logical_mesh).unknown:
        notes.append(f"the compiler estimates no cycles for {unknown} kernels")
    return rows, notes


def _together(found: Sequence[CompiledCollective]) -> list[str]:
    joined = [one for one in found if one.arrays > 1 and one.group > 1]
    if not joined:
        return []
    arrays = sum(one.arrays for one in joined)
    return [f"{arrays} tensors are communicated in {len(joined)} collectives"]


# -- the program -----------------------------------------------------------------------------------


def _planned_program(plan: Plan, fn: Callable[..., Any] | Program, args: Sequence[Any]) -> Program:
    if isinstance(fn, Program):
        return fn
    donated = plan.data.program.donate_argnums
    shapes = jax.tree.map(abstract, tuple(args))
    plan._check_arguments(args)

    def trace() -> Program:
        return Program.trace(fn, *shapes, donate_argnums=donated)

    named = plan.data.options.mesh
    program = in_mesh(named, trace)
    if named is None and program.fingerprint != plan.data.program.fingerprint:
        return in_mesh(plan.mesh_axes, trace)
    return program


# -- what the child is given -----------------------------------------------------------------------


def _cpu_job(plan: Plan, program: Program, args: Sequence[Any], folder: Path) -> dict[str, Any]:
    nbytes = sum(math.prod(t.shape) * 4 for t in (*program.inputs, *program.outputs)) * math.prod(
        plan.mesh_axes.values()
    )
    if nbytes > _MOST_CPU_BYTES:
        raise InputError(
            f"the program's inputs and outputs take {nbytes / 1e9:.0f} GB on all devices together, "
            f"and {_MOST_CPU_BYTES / 1e9:.0f} at most are run on CPU",
            where="verify",
            do="Verify fewer or smaller layers on CPU, or use the TPU compiler",
        )
    with program.module() as module:
        place_kernels(module, program.kernel_calls, None, {}, "cpu")
        erase_prints(mlir.entry_block(mlir.main_function(module)))
        text = str(module.operation.get_asm(enable_debug_info=True))
    (folder / "plain.mlir").write_text(text)
    values = _values(program, args)
    for number, value in enumerate(values):
        np.save(folder / f"input{number}.npy", value)
    return {
        "compiler": "cpu",
        "mesh_axes": plan.mesh_axes,
        "inputs": len(values),
        "input_dtypes": [_numpy_name(t.dtype) for t in program.inputs],
        "in_specs": [t.spec for t in plan.data.program.inputs],
        "out_specs": [t.spec for t in plan.data.program.outputs],
    }


def _values(program: Program, args: Sequence[Any]) -> list[Any]:
    """What a program is run with: the arguments where they are arrays, made up otherwise."""
    leaves = jax.tree.leaves(tuple(args))
    if leaves and not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        return [_plain(leaf) for leaf in leaves]
    rng = np.random.default_rng(0)
    made = []
    for tensor in program.inputs:
        name = _numpy_name(tensor.dtype)
        if name.startswith(("bfloat", "float")):
            # Above zero, as second moments and variances have to be.
            made.append(rng.uniform(0.0, 0.1, tensor.shape).astype(np.float32))
        elif name == "bool":
            made.append(rng.integers(0, 2, tensor.shape).astype(bool))
        else:
            made.append(rng.integers(0, 2, tensor.shape).astype(np.int32))
    return made


def _plain(leaf: Any) -> Any:
    """A leaf as numpy can save it: keys as their words, bfloat16 as float32."""
    if jax.numpy.issubdtype(jax.typeof(leaf).dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(leaf))
    value = np.asarray(leaf)
    return value.astype(np.float32) if value.dtype.name.startswith(("bfloat", "float8")) else value


def _numpy_name(dtype: str) -> str:
    """numpy's name of a StableHLO element type."""
    if dtype == "i1":
        return "bool"
    if dtype == "bf16":
        return "bfloat16"
    kinds = {"ui": "uint", "i": "int", "f": "float"}
    match = re.fullmatch(r"(ui|i|f)(\d+)", dtype)
    if match is None:
        raise InputError(
            f"values of type {dtype} cannot be made up", where="verify", do="Verify it for TPU"
        )
    return kinds[match[1]] + match[2]


def _without_program(plan: Plan, compiler: Compiler, said: str) -> Verification:
    """What is known where the compiler found no room for the program."""
    return Verification(
        **_about(plan, compiler),
        compile_seconds=0.0,
        fits=False,
        problem=said,
        collectives=[],
        operations=[],
        memory=MemoryComparison(
            predicted_peak=plan.estimate.peak_memory_bytes,
            compiled_peak=None,
            compiled_used=bytes_used(said),
            arguments=0.0,
            temporaries=0.0,
            outputs=0.0,
            aliased=0.0,
            predicted_buffers=list(plan.estimate.peak_buffers),
            compiled_buffers=[],
        ),
        time=_time(plan, None),
        outputs=[],
        notes=[f"the compiler finds no room for the program: {said}"],
    )
