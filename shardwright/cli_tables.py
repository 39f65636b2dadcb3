"""Chips and reference models as people read them in a terminal."""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from pydantic import BaseModel
from rich.console import Group, RenderableType
from rich.text import Text

from shardwright.cli_text import table
from shardwright.hardware_profiles.chip import ChipProfile, CubeWraparound, Sourced
from shardwright.hardware_profiles.slices import legal_slices
from shardwright.reports.numbers import count, quantity

if TYPE_CHECKING:
    from shardwright.models.families import Options
    from shardwright.models.registry import ReferenceModel

_SHOWN_SLICES = 40
_UNIT_SUFFIX = re.compile("_(s|hz|bytes)$")
_NAMES = {name.lower(): name for name in ("HBM", "ICI", "DCN", "VMEM", "VPU", "MXU", "PCIe", "JAX")}
_NAMES |= {"mxus": "MXUs", "alus": "ALUs", "macs": "MACs", "tensorcores": "TensorCores"}
_UNITS = {
    "peak_flops": (1e12, "TFLOP/s"),
    "hbm_bytes": (2**30, "GiB"),
    "hbm_bandwidth": (1e9, "GB/s"),
    "vmem_bytes_per_tensorcore": (2**20, "MiB"),
    "clock_hz": (1e6, "MHz"),
    "ici_link_bandwidth_nominal": (1e9, "GB/s"),
    "ici_link_bandwidth": (1e9, "GB/s"),
    "core_link_bandwidth": (1e9, "GB/s"),
    "hop_latency_s": (1e-6, "µs"),
    "collective_overhead_s": (1e-6, "µs"),
    "dcn_bandwidth_per_chip": (1e9, "GB/s"),
    "dcn_latency_s": (1e-6, "µs"),
    "pcie_bandwidth_per_chip": (1e9, "GB/s"),
}


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _wraps(chip: ChipProfile) -> str:
    rule = chip.wraparound.value
    if isinstance(rule, CubeWraparound):
        return f"{rule.multiple}x cubes"
    return f"axis ≥ {rule.size}"


def _peak(chip: ChipProfile, dtype: str, scale: float) -> str:
    return next(
        (f"{peak.value / scale:,.0f}" for name, peak in chip.peak_flops.items() if name == dtype),
        "-",
    )


_ROWS: tuple[tuple[str, Callable[[ChipProfile], str]], ...] = (
    ("bf16 peak, TFLOP/s", lambda chip: _peak(chip, "bf16", 1e12)),
    ("fp8 peak, TFLOP/s", lambda chip: _peak(chip, "f8", 1e12)),
    ("int8 peak, TOP/s", lambda chip: _peak(chip, "i8", 1e12)),
    ("HBM, GiB", lambda chip: f"{chip.hbm_bytes.value / 2**30:.0f}"),
    ("HBM bandwidth, GB/s", lambda chip: f"{chip.hbm_bandwidth.value / 1e9:,.0f}"),
    ("ICI links", lambda chip: str(chip.ici_links_per_chip.value)),
    ("ICI link one way, GB/s", lambda chip: f"{chip.ici_link_bandwidth.value / 1e9:.1f}"),
    ("DCN one way, GB/s", lambda chip: f"{chip.dcn_bandwidth_per_chip.value / 1e9:g}"),
    ("TensorCores", lambda chip: str(chip.tensorcores_per_chip.value)),
    ("JAX devices", lambda chip: str(chip.jax_devices_per_chip.value)),
    ("torus dimensions", lambda chip: str(chip.torus_dimensions.value)),
    ("wraparound", _wraps),
    ("largest pod", lambda chip: _shape(chip.largest_pod.value)),
    ("legal slices", lambda chip: str(len(legal_slices(chip)))),
)


def chips_view(chips: Sequence[ChipProfile]) -> RenderableType:
    """All chips side by side; values are of a whole chip."""
    shown = table("a chip", *(f">{chip.name}" for chip in chips))
    for name, value in _ROWS:
        shown.add_row(Text(name), *(value(chip) for chip in chips))
    return shown


def chip_view(chip: ChipProfile, everything: bool) -> RenderableType:
    """Every value of one chip with its source, and its slices."""
    values = table("of a chip", ">value", "source", "what to know")
    sources: dict[str, int] = {}

    def cite(sourced: Sourced[Any]) -> str:
        return f"[{sources.setdefault(sourced.source, len(sources) + 1)}]"

    for name in type(chip).model_fields:
        field = getattr(chip, name)
        entries = field.items() if isinstance(field, dict) else [("", field)]
        for key, sourced in entries:
            if isinstance(sourced, Sourced) and name != "slices":
                label = f"{key} {name}" if key else name
                values.add_row(
                    _label(label),
                    _value_text(name, sourced.value),
                    Text(cite(sourced)),
                    Text(sourced.note or "", "dim"),
                )
    slices = _slices(chip, everything, Text(cite(chip.slices), "dim"))
    return Group(
        Text(chip.name, "bold"),
        Text(),
        values,
        Text(),
        *slices,
        Text(),
        Text("Sources", "bold"),
        *(Text(f"[{number}] {source}", overflow="fold") for source, number in sources.items()),
    )


def _label(field: str) -> str:
    words = _UNIT_SUFFIX.sub("", field).split("_")
    return " ".join(_NAMES.get(word, word) for word in words)


def _value_text(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name in _UNITS:
        scale, unit = _UNITS[name]
        return f"{value / scale:,.4g} {unit}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, BaseModel):
        value = value.model_dump()
    if isinstance(value, dict):
        return "\n".join(f"{key.replace('_', ' ')}: {part}" for key, part in value.items())
    if isinstance(value, tuple):
        numbers = all(isinstance(part, int) for part in value)
        return _shape(value) if numbers else "\n".join(map(str, value))
    return str(value)


def _slices(chip: ChipProfile, everything: bool, citation: Text) -> Sequence[RenderableType]:
    slices = legal_slices(chip)
    shown = slices if everything else slices[:_SHOWN_SLICES]
    by_chips: dict[int, list[str]] = defaultdict(list)
    for one in shown:
        by_chips[one.chips].append(_shape(one.shape))
    sizes = table(">chips", "shapes")
    for chips, shapes in by_chips.items():
        sizes.add_row(f"{chips:,}", "  ".join(shapes))
    rest = len(slices) - len(shown)
    more = f"; the {rest} larger are left out, --all shows them" if rest else ""
    heading = Text.assemble(("Slices", "bold"), (f"  {len(slices)}{more} ", "dim"), citation)
    note = [Text(chip.slices.note, "dim")] if chip.slices.note else []
    return heading, sizes, *note


def models_view(models: Sequence[ReferenceModel]) -> RenderableType:
    """The sizes of all reference models, as far as 80 columns hold them."""
    sizes = ("layers", "d_model", "sequence", "batch")
    shown = table("model", "kind", ">parameters", *(f">{size}" for size in sizes))
    for model in models:
        options = model.options.model_dump()
        shown.add_row(
            model.name,
            model.kind,
            count(model.parameter_count),
            # A detector's layers, and sizes that a kind does not have, are no single number.
            *(str(n) if isinstance(n := options.get(size), int) else "-" for size in sizes),
        )
    return shown


def model_view(model: ReferenceModel) -> RenderableType:
    """The options of one reference model."""
    options = model.options
    known = meanings(type(options))
    shown = table("option", ">value", "meaning")
    for name, field in type(options).model_fields.items():
        parts = (field.annotation, *get_args(field.annotation))
        choices = [
            choice for part in parts if get_origin(part) is Literal for choice in get_args(part)
        ]
        value = getattr(options, name)
        meaning = Text(known.get(name, ""))
        if choices:
            meaning.append(f" ({', '.join(choices)})", "dim")
        shown.add_row(name, str(value), meaning)
    facts = (
        f"{count(model.parameter_count)} parameters, {count(model.tokens_per_step)} "
        f"{model.options.unit} and "
        f"{quantity(float(model.model_flops_per_step), 'FLOP')} a step"
    )
    return Group(Text.assemble((model.name, "bold"), f"  {facts}"), Text(), shown)


def meanings(schema: type[Options]) -> dict[str, str]:
    """What each option means, from the docstrings of the options."""
    found: dict[str, str] = {}
    for owner in schema.__mro__:
        documented = inspect.cleandoc(owner.__doc__ or "").partition("Attributes:\n")[2]
        for name, meaning in re.findall(r"^  (\w+): ((?:.+\n?)(?:    .+\n?)*)", documented, re.M):
            found.setdefault(name, re.sub(r"\s+", " ", meaning).strip())
    return found
