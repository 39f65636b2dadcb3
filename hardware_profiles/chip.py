"""Chip profiles: what the planner knows of one TPU generation, each value with its source."""

from __future__ import annotations

import hashlib
import json
import tomllib
from functools import cache, cached_property
from importlib import resources
from math import prod
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from shardwright.errors import InputError
from shardwright.extensions import load_extensions
from shardwright.hardware_profiles.calibration import (
    UNCALIBRATED,
    Calibration,
    bundled_calibration,
)

_FORM_HELP = "compare it with a bundled profile: shardwright hardware v5e --json"
_GENERATIONS = ("v2", "v3", "v4", "v5e", "v5p", "v6e", "tpu7x")

T = TypeVar("T")


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("Input should be a number, not true or false")
    return value


_Number = Annotated[float, BeforeValidator(_no_bool)]
Bandwidth = Annotated[_Number, Field(ge=1e6, le=1e18)]
"""Bytes/s; the bounds are far from any chip, and tell a value in another unit (GB/s, Gbit/s)."""
Flops = Annotated[_Number, Field(ge=1e9, le=1e21)]
Hertz = Annotated[_Number, Field(ge=1e6, le=1e13)]
Latency = Annotated[_Number, Field(ge=0, le=1)]
Count = Annotated[int, BeforeValidator(_no_bool), Field(ge=1, le=1 << 24)]
ByteCount = Annotated[int, BeforeValidator(_no_bool), Field(ge=1 << 16, le=1 << 50)]
Shape = tuple[Count, ...]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False)


class Sourced(_Frozen, Generic[T]):
    """A value, where it comes from, and what to know about it."""

    value: T
    source: Annotated[str, Field(min_length=1)]
    note: str | None = None


class AxisWraparound(_Frozen):
    """A dimension has wraparound links when it is at least `size` chips long."""

    rule: Literal["axis_at_least"]
    size: Count


class CubeWraparound(_Frozen):
    """Every dimension wraps when all are multiples of `multiple`; else none does."""

    rule: Literal["full_cubes"]
    multiple: Count


class SliceRule(_Frozen):
    """Which slice shapes exist.

    `shapes` are listed one by one. With `cube_edge`, so are all shapes A <= B <= C whose
    dimensions are multiples of the edge, up to `largest_cube_slice_chips` chips.
    """

    shapes: tuple[Shape, ...]
    cube_edge: Count | None = None
    largest_cube_slice_chips: Count | None = None

    @model_validator(mode="after")
    def _cube_edge_and_limit_come_together(self) -> SliceRule:
        if (self.cube_edge is None) != (self.largest_cube_slice_chips is None):
            raise ValueError("cube_edge and largest_cube_slice_chips come together")
        return self


class WholeMeshAsAllReduce(_Frozen):
    """When the TPU compiler turns a collective over the whole mesh into an all-reduce.

    From `..._min_devices` devices on (never where it is null); an all-gather only up to
    `all_gather_max_bytes` of output, or at any size where that is null.
    """

    all_gather_min_devices: Count | None
    all_gather_max_bytes: ByteCount | None
    reduce_scatter_min_devices: Count | None


class ChipProfile(_Frozen):
    """One TPU generation.

    Values are for a whole chip unless the name says otherwise; bandwidths are bytes/s one way,
    times are seconds. The `device_...` properties are for one JAX device, of which a chip of
    v2, v3 and tpu7x has two.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_.]*$")]
    device_kinds: Sourced[tuple[str, ...]]
    libtpu_chip_config: Sourced[str | None]
    product_prefixes: Sourced[tuple[str, ...]]
    product_counts: Sourced[Literal["chips", "tensorcores"]]
    torus_dimensions: Sourced[Literal[1, 2, 3]]
    tensorcores_per_chip: Sourced[Count]
    jax_devices_per_chip: Sourced[Literal[1, 2]]
    peak_flops: dict[Literal["bf16", "f8", "i8", "i4"], Sourced[Flops]]
    f32_matmul_passes: Sourced[dict[Literal["default", "high", "highest"], Count]]
    hbm_bytes: Sourced[ByteCount]
    hbm_bandwidth: Sourced[Bandwidth]
    vmem_bytes_per_tensorcore: Sourced[ByteCount]
    cmem_bytes: Sourced[ByteCount] | None = None
    mxus_per_tensorcore: Sourced[Count]
    mxu_shape: Sourced[tuple[Count, Count]]
    mxu_macs_per_cell_per_cycle: Sourced[Count]
    vpu_shape: Sourced[tuple[Count, Count]]
    vpu_alus: Sourced[Count]
    clock_hz: Sourced[Hertz]
    ici_links_per_chip: Sourced[Count]
    ici_link_bandwidth_nominal: Sourced[Bandwidth]
    ici_link_bandwidth: Sourced[Bandwidth]
    core_link_bandwidth: Sourced[Bandwidth] | None = None
    hop_latency_s: Sourced[Latency]
    collective_overhead_s: Sourced[Latency]
    chips_per_host: Sourced[Count]
    dcn_bandwidth_per_chip: Sourced[Bandwidth]
    dcn_latency_s: Sourced[Latency]
    pcie_bandwidth_per_chip: Sourced[Bandwidth]
    wraparound: Sourced[Annotated[AxisWraparound | CubeWraparound, Field(discriminator="rule")]]
    twisted_tori: Sourced[bool]
    largest_pod: Sourced[Shape]
    slices: Sourced[SliceRule]
    whole_mesh_as_all_reduce: Sourced[WholeMeshAsAllReduce]
    like: str | None = None
    """Of a chip that is told by how it differs: the generation whose efficiencies it has."""
    calibration: Calibration = UNCALIBRATED

    @field_validator("peak_flops")
    @classmethod
    def _bf16_is_given(cls, peaks: dict[str, Sourced[float]]) -> dict[str, Sourced[float]]:
        if "bf16" not in peaks:
            raise ValueError("bf16 is needed; other types fall back on it")
        return peaks

    @model_validator(mode="after")
    def _parts_agree(self) -> ChipProfile:
        dimensions = self.torus_dimensions.value
        rule = self.slices.value
        for shape in (*rule.shapes, self.largest_pod.value):
            if len(shape) != dimensions:
                raise ValueError(f"shape {list(shape)} does not have {dimensions} dimensions")
        if self.tensorcores_per_chip.value % self.jax_devices_per_chip.value:
            raise ValueError(
                f"jax_devices_per_chip={self.jax_devices_per_chip.value} does not divide "
                f"tensorcores_per_chip={self.tensorcores_per_chip.value}: a device has whole cores"
            )
        if self.jax_devices_per_chip.value > 1 and self.core_link_bandwidth is None:
            raise ValueError("core_link_bandwidth is needed with two devices a chip")
        if set(self.f32_matmul_passes.value) != {"default", "high", "highest"}:
            raise ValueError("f32_matmul_passes needs default, high and highest")
        return self

    @cached_property
    def digest(self) -> str:
        """First 16 hexadecimal digits of the SHA-256 of the profile's canonical JSON."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def generation(self) -> str:
        """The generation whose measured efficiencies count."""
        return self.like or self.name

    def device_peak_flops(
        self, dtype: str, precision: Literal["default", "high", "highest"] = "default"
    ) -> float:
        """Peak FLOP/s of the matrix units of one JAX device.

        Args:
          dtype: element type of the operands, as StableHLO ("bf16", "f8E4M3FN", "si8") or numpy
            ("bfloat16", "float8_e4m3fn", "int8") name it, in either case.
          precision: XLA's precision of the operation; matters for f32 and wider.

        f32 and f64 operands run as bf16 passes: one by default, three or six at higher precision
        (`f32_matmul_passes`). f16 counts as bf16. An 8-bit float without its own peak, and an
        8-bit integer without one, run as bf16; a 4-bit integer as 8-bit. Wider integers and
        booleans count as bf16, which flatters them. A complex product is four real ones.

        Raises:
          InputError: the type is not known.
        """
        kind = _matmul_type(dtype)
        devices = self.jax_devices_per_chip.value
        for candidate in _FALLBACKS[kind]:
            if candidate in self.peak_flops:
                peak = self.peak_flops[candidate].value / devices
                break
        if kind in ("f32", "complex"):
            peak /= self.f32_matmul_passes.value[precision]
        return peak / 4 if kind == "complex" else peak

    @property
    def device_tensorcores(self) -> int:
        """TensorCores of one JAX device."""
        return self.tensorcores_per_chip.value // self.jax_devices_per_chip.value

    @property
    def device_hbm_bytes(self) -> int:
        """HBM bytes that one JAX device addresses."""
        return self.hbm_bytes.value // self.jax_devices_per_chip.value

    @property
    def device_hbm_bandwidth(self) -> float:
        """HBM bandwidth of one JAX device, bytes/s."""
        return self.hbm_bandwidth.value / self.jax_devices_per_chip.value

    @property
    def device_vmem_bytes(self) -> int:
        """VMEM bytes of one JAX device."""
        return self.vmem_bytes_per_tensorcore.value * self.device_tensorcores

    @property
    def device_mxus(self) -> int:
        """Matrix units of one JAX device."""
        return self.mxus_per_tensorcore.value * self.device_tensorcores

    @property
    def device_vpu_lanes(self) -> int:
        """32-bit vector operations that one JAX device can start each cycle."""
        return prod(self.vpu_shape.value) * self.vpu_alus.value * self.device_tensorcores

    @property
    def device_dcn_bandwidth(self) -> float:
        """One JAX device's share of its host's network bandwidth, bytes/s one way."""
        return self.dcn_bandwidth_per_chip.value / self.jax_devices_per_chip.value

    @property
    def device_pcie_bandwidth(self) -> float:
        """One JAX device's share of its chip's PCIe link, bytes/s one way."""
        return self.pcie_bandwidth_per_chip.value / self.jax_devices_per_chip.value

    def wraps(self, shape: tuple[int, ...]) -> tuple[bool, ...]:
        """Which dimensions of a slice of `shape` chips have wraparound links."""
        rule = self.wraparound.value
        if isinstance(rule, AxisWraparound):
            return tuple(size >= rule.size for size in shape)
        return (all(size % rule.multiple == 0 for size in shape),) * len(shape)


_FALLBACKS: dict[str, tuple[Literal["bf16", "f8", "i8", "i4"], ...]] = {
    "bf16": ("bf16",),
    "f32": ("bf16",),
    "complex": ("bf16",),
    "f8": ("f8", "bf16"),
    "i8": ("i8", "bf16"),
    "i4": ("i4", "i8", "bf16"),
}

_TYPE_NAMES = {
    "bf16": ("bf16", "bfloat16", "f16", "float16"),
    "f32": ("f32", "float32", "f64", "float64", "tf32"),
    "complex": ("c64", "complex64", "c128", "complex128", "complex<f32>", "complex<f64>"),
    "i8": ("i8", "si8", "ui8", "u8", "s8", "int8", "uint8"),
    "i4": ("i4", "si4", "ui4", "u4", "s4", "int4", "uint4", "i2", "ui2", "int2", "uint2"),
}
_TYPES = {name: kind for kind, names in _TYPE_NAMES.items() for name in names}
_WIDE_INTEGERS = {
    f"{prefix}{bits}"
    for prefix in ("i", "si", "ui", "u", "s", "int", "uint")
    for bits in (16, 32, 64)
} | {"i1", "bool", "pred"}


def _matmul_type(dtype: str) -> str:
    name = dtype.lower()
    if name in _TYPES:
        return _TYPES[name]
    if name.startswith(("f8e", "float8_", "f4e", "float4_", "f6e", "float6_")) or name == "f8":
        return "f8"
    if name in _WIDE_INTEGERS:
        return "bf16"
    raise InputError(
        f"element type {dtype!r} is not known",
        do="use a StableHLO or numpy name such as bf16, f32, i8 or f8E4M3FN",
    )


_REGISTERED: dict[str, ChipProfile] = {}


def chip_names() -> tuple[str, ...]:
    """Names of the known profiles: those of the package, oldest first, then those registered."""
    load_extensions()
    return (*_GENERATIONS, *_REGISTERED)


def is_bundled(chip: ChipProfile) -> bool:
    """Whether a profile is one that comes with the package, as it comes."""
    return chip.name in _GENERATIONS and chip == _bundled(chip.name)


def register_chip(profile: ChipProfile | dict[str, Any] | str | Path) -> ChipProfile:
    """Makes a chip known by its name: "mine:4x4" is then a topology as "v5e:4x4" is.

    Args:
      profile: a profile, its data, or the path of its JSON or TOML file; see `load_chip`.

    Returns:
      the profile.

    Raises:
      InputError: it is malformed, or another chip has its name or one of its product prefixes.
    """
    if isinstance(profile, ChipProfile):
        chip = profile
    else:
        chip = parse_chip(profile) if isinstance(profile, dict) else load_chip(Path(profile))
    for name in chip_names():
        other = load_chip(name)
        if other == chip:
            return other
        taken = {name.lower(), *map(str.lower, other.product_prefixes.value)}
        if taken & {chip.name.lower(), *map(str.lower, chip.product_prefixes.value)}:
            raise InputError(
                f"{chip.name} has a name or product prefix of the known chip {name}",
                where="register_chip",
                do="Give it names of its own, or pass it as chip= instead",
            )
    _REGISTERED[chip.name.lower()] = chip
    return chip


def unregister_chip(name: str) -> None:
    """Makes a registered chip unknown again; one that is not registered is no error."""
    _REGISTERED.pop(name.lower(), None)


@cache
def _bundled(name: str) -> ChipProfile:
    text = resources.files(__package__).joinpath(f"{name}.json").read_text(encoding="utf-8")
    profile = json.loads(text)
    terms = bundled_calibration(name)
    return ChipProfile.model_validate(profile | ({"calibration": terms} if terms else {}))


def load_chip(name_or_path: str | Path) -> ChipProfile:
    """Load a known profile by name ("v5e"), or a user's own from a JSON or TOML file.

    A file has the form of the bundled profiles, or names one as its `base` and gives the `values`
    that differ, see `derive_chip`.

    Raises:
      InputError: no such profile or file, or the file is malformed; says which field and why.
    """
    if isinstance(name_or_path, str) and name_or_path.lower() in _GENERATIONS:
        return _bundled(name_or_path.lower())
    if isinstance(name_or_path, str) and name_or_path.lower() in chip_names():
        return _REGISTERED[name_or_path.lower()]
    path = Path(name_or_path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        if isinstance(name_or_path, Path) or path.suffix in (".json", ".toml"):
            raise InputError(
                f"the profile cannot be read ({error})",
                where=str(path),
                do="give the path of a JSON or TOML file in the form of the bundled profiles",
            ) from error
        raise InputError(
            f"there is no chip called {str(name_or_path)!r}",
            do=f"use one of {', '.join(chip_names())}, or the path of a profile's file",
        ) from error
    if path.suffix != ".toml":
        return parse_chip(text, where=str(path))
    try:
        return parse_chip(tomllib.loads(text), where=str(path))
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"this is not TOML ({error})", where=str(path), do=_FORM_HELP) from None


def parse_chip(profile: str | dict[str, Any], *, where: str = "chip profile") -> ChipProfile:
    """Validate a profile given as JSON text or as the object it decodes to; see `load_chip`.

    Raises:
      InputError: it is malformed; says which field and why.
    """
    try:
        given = json.loads(profile) if isinstance(profile, str) else profile
    except (ValueError, RecursionError) as error:
        raise InputError(f"file: Invalid JSON ({error})", where=where, do=_FORM_HELP) from None
    if isinstance(given, dict) and "base" in given:
        from shardwright.hardware_profiles.derived import parse_derived

        return parse_derived(given, where=where)
    try:
        return ChipProfile.model_validate_json(json.dumps(given))
    except ValidationError as error:
        problems = [
            f"{'.'.join(str(part) for part in problem['loc']) or 'file'}: {problem['msg']}"
            for problem in error.errors()
        ]
        raise InputError(
            "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if problems[5:] else ""),
            where=where,
            do=_FORM_HELP,
        ) from error
