"""Compare slices and device order with what libtpu reports. Needs `shardwright[tpu]`, no TPU.

    python benchmarks/check_topologies.py [TOPOLOGY ...]

Each slice is asked for in a child process, since libtpu keeps one topology a process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from shardwright.hardware_profiles import (
    chip_names,
    device_coordinates,
    enumerate_meshes,
    legal_slices,
    load_chip,
    order_devices,
    parse_slice,
    physical_dimensions,
)

CHILD_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "JAX_PLATFORMS": "cpu",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def smallest_and_cube_slices() -> list[str]:
    """Of every generation, the slices of at most 256 chips, and two joined of one."""
    names = [
        one.name
        for chip in chip_names()
        for one in legal_slices(load_chip(chip))
        if one.chips <= 256
    ]
    return [*names, "2*v5e:4x4", "2*tpu7x:2x2x1"]


def report(topology: str) -> dict[str, object]:
    """What libtpu says of one slice: devices, kinds, and whether every mesh can be laid on it."""
    from jax.experimental import topologies

    wanted = parse_slice(topology)
    options: dict[str, object] = {}
    if config := wanted.chip.libtpu_chip_config.value:
        options["chip_config_name"] = config
    if wanted.count > 1:
        options["num_slices"] = wanted.count
    if wanted.chips // wanted.count == 1:
        options["chips_per_host_bounds"] = (1, 1, 1)
    shape = "x".join(map(str, wanted.shape))
    description = topologies.get_topology_desc(
        platform="tpu", topology_name=f"{wanted.chip.name}:{shape}", **options
    )
    devices = description.devices
    names = [dimension.name for dimension in physical_dimensions(wanted)]
    torus = [name for name in names if name in ("x", "y", "z")]
    laid = 0
    for mesh in enumerate_meshes(wanted):
        ordered = order_devices(mesh, devices).reshape(-1)
        expected = device_coordinates(mesh).reshape(-1, len(names))
        for device, place in zip(ordered, expected, strict=True):
            at = dict(zip(names, map(int, place), strict=True))
            assert list(device.coords)[: len(torus)] == [at[name] for name in torus]
            assert device.core_on_chip == at.get("core", 0)
        laid += 1
    return {
        "devices": len(devices),
        "processes": len({device.process_index for device in devices}),
        "kinds": sorted({device.device_kind for device in devices}),
        "meshes": laid,
    }


def main(topologies: list[str]) -> int:
    """Print one line a slice; return the number of slices that disagree."""
    wrong = 0
    for topology in topologies or smallest_and_cube_slices():
        wanted = parse_slice(topology)
        child = subprocess.run(
            [sys.executable, __file__, "--report", topology],
            env=os.environ | CHILD_ENVIRONMENT,
            capture_output=True,
            text=True,
            check=False,
        )
        if child.returncode:
            wrong += 1
            print(f"{topology}: failed: {child.stderr.strip().splitlines()[-1]}")
            continue
        found = json.loads(child.stdout.splitlines()[-1])
        agrees = found["devices"] == wanted.devices and set(found["kinds"]) <= set(
            wanted.chip.device_kinds.value
        )
        wrong += not agrees
        print(
            f"{topology}: {found['devices']} devices of {', '.join(found['kinds'])}, "
            f"{found['processes']} processes, {found['meshes']} meshes laid: "
            f"{'agrees' if agrees else f'DISAGREES, profile says {wanted.devices}'}"
        )
    return wrong


if __name__ == "__main__":
    if sys.argv[1:2] == ["--report"]:
        print(json.dumps(report(sys.argv[2])))
    else:
        sys.exit(min(main(sys.argv[1:]), 1))
