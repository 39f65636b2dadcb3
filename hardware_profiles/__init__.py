"""TPU generations, their slices, and logical meshes laid on them."""

from shardwright.hardware_profiles.chip import (
    ChipProfile,
    chip_names,
    load_chip,
    parse_chip,
    register_chip,
    unregister_chip,
)
from shardwright.hardware_profiles.derived import derive_chip
from shardwright.hardware_profiles.mesh import (
    AxisRef,
    LogicalMesh,
    MeshAxis,
    PhysicalDimension,
    Segment,
    device_coordinates,
    enumerate_meshes,
    meshes_for_shape,
    order_devices,
    physical_dimensions,
)
from shardwright.hardware_profiles.slices import Slice, legal_slices, parse_slice, product_name

__all__ = [
    "AxisRef",
    "ChipProfile",
    "LogicalMesh",
    "MeshAxis",
    "PhysicalDimension",
    "Segment",
    "Slice",
    "chip_names",
    "derive_chip",
    "device_coordinates",
    "enumerate_meshes",
    "legal_slices",
    "load_chip",
    "meshes_for_shape",
    "order_devices",
    "parse_chip",
    "parse_slice",
    "physical_dimensions",
    "product_name",
    "register_chip",
    "unregister_chip",
]
