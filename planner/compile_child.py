"""Compiles an annotated module, and on CPU runs it: what `verify` starts as a process of its own.

    python -m shardwright.planner.compile_child FOLDER

A program that a compiler cannot take may end the process, so nothing else runs in it. FOLDER holds
`job.json` and the modules; what was found is written there as `result.json` and `compiled.hlo`.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np


def main(folder: Path) -> None:
    """Does the job in a folder."""
    job = json.loads((folder / "job.json").read_text())
    do = _compile_for_tpu if job["compiler"] == "tpu" else _run_on_cpu
    result = do(folder, job)
    (folder / "result.json").write_text(json.dumps(result))


def _module(path: Path) -> Any:
    from shardwright.planner import mlir

    context = mlir.new_context()
    with context:
        return mlir.ir.Module.parse(path.read_text())


def _compile_for_tpu(folder: Path, job: dict[str, Any]) -> dict[str, Any]:
    from jax._src import compiler
    from jax.experimental import topologies

    from shardwright.hardware_profiles.chip import parse_chip
    from shardwright.hardware_profiles.mesh import LogicalMesh, order_devices

    options = {"chips_per_host_bounds": job["host"]}
    if job["megacore"]:
        options["chip_config_name"] = "megacore"
    if job["slices"] > 1:
        options["num_slices"] = job["slices"]
    topology = topologies.get_topology_desc(
        platform="tpu", topology_name=job["topology"], **options
    )
    mesh = LogicalMesh.from_json(job["mesh"], parse_chip(job["chip"]))
    devices: Any = order_devices(mesh, topology.devices).reshape(1, -1)
    compile_options = compiler.get_compile_options(
        num_replicas=1,
        num_partitions=devices.size,
        device_assignment=devices,
        env_options_overrides=job["compiler_options"],
    )
    began = time.monotonic()
    module = _module(folder / "annotated.mlir")
    with module.context:
        executable = compiler.backend_compile_and_load(
            devices.flat[0].client,
            module,
            _device_list(devices),
            compile_options,
            [],
        )
    seconds = time.monotonic() - began
    return {"seconds": seconds, **_facts(executable, folder)}


def _device_list(devices: Any) -> Any:
    from jaxlib import xla_client

    return xla_client.DeviceList(tuple(devices.flat))


def _facts(executable: Any, folder: Path) -> dict[str, Any]:
    """Writes the HLO text, and tells what the executable says of its memory."""
    modules = executable.hlo_modules()
    (folder / "compiled.hlo").write_text("\n".join(m.to_string() for m in modules))
    memory = executable.get_compiled_memory_stats()
    return {
        "memory": {
            "arguments": memory.argument_size_in_bytes,
            "outputs": memory.output_size_in_bytes,
            "aliased": memory.alias_size_in_bytes,
            "temporaries": memory.temp_size_in_bytes,
            "peak": getattr(memory, "peak_memory_in_bytes", 0),
        }
    }


def _run_on_cpu(folder: Path, job: dict[str, Any]) -> dict[str, Any]:
    """Compiles and runs the program on one device and, annotated, on as many as were planned."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    sizes = tuple(job["mesh_axes"].values())
    count = math.prod(sizes)

    def arguments() -> list[Any]:
        """New arrays each time: a program deletes those that it takes over."""
        return [
            jax.numpy.asarray(np.load(folder / f"input{i}.npy")).astype(dtype)
            for i, dtype in enumerate(job["input_dtypes"])
        ]

    began = time.monotonic()
    single = _executable(folder / "plain.mlir", np.array(jax.devices()[:1]).reshape(1, 1))
    expected = [shards[0] for shards in _execute(single, arguments())]
    devices = np.array(jax.devices()[:count]).reshape(1, count)
    many = _executable(folder / "annotated.mlir", devices)
    mesh = Mesh(devices.reshape(sizes), tuple(job["mesh_axes"]))

    def sharding(spec: list[list[str]]) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*(tuple(axes) or None for axes in spec)))

    placed = [
        jax.device_put(x, sharding(spec))
        for x, spec in zip(arguments(), job["in_specs"], strict=True)
    ]
    found = [
        jax.make_array_from_single_device_arrays(one.shape, sharding(spec), shards)
        for one, spec, shards in zip(
            expected, job["out_specs"], _execute(many, placed), strict=True
        )
    ]
    errors = [
        _difference(np.asarray(a), np.asarray(b)) for a, b in zip(found, expected, strict=True)
    ]
    seconds = time.monotonic() - began
    return {"seconds": seconds, "differences": errors, **_facts(many, folder)}


def _executable(path: Path, devices: Any) -> Any:
    from jax._src import compiler

    options = compiler.get_compile_options(
        num_replicas=1, num_partitions=devices.size, device_assignment=devices
    )
    module = _module(path)
    with module.context:
        return compiler.backend_compile_and_load(
            devices.flat[0].client, module, _device_list(devices), options, []
        )


def _execute(executable: Any, arrays: list[Any]) -> list[list[Any]]:
    """Runs an executable: for each result its shard on each device."""
    results = executable.execute_sharded(arrays)
    shards: list[list[Any]] = results.disassemble_into_single_device_arrays()
    return shards


def _difference(found: Any, expected: Any) -> float:
    """Largest difference, as a part of the largest expected value; infinite for a NaN."""
    a, b = (np.asarray(x, dtype=np.float64) for x in (found, expected))
    if a.size == 0:
        return 0.0
    if not (np.isfinite(a) == np.isfinite(b)).all():
        return math.inf
    finite = np.isfinite(b)
    largest = max(float(np.abs(b[finite]).max(initial=0.0)), 1e-30)
    return float(np.abs(a - b)[finite].max(initial=0.0)) / largest


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    main(Path(sys.argv[1]))
