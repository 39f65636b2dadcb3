"""What the costs of an operation need beyond shapes, read from its attributes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardwright.planner.given import CONSTRAINT, constraint_detail, replica_groups
from shardwright.planner.kernel_ops import pallas_cost, read_kernel
from shardwright.planner.mlir import ir
from shardwright.planner.shifts import shift_of

_CONV_LABELS = re.compile(r"\[([^\]]*)\]")
_FRONTEND_ATTRIBUTES = "mhlo.frontend_attributes"
_PLACEMENT = "_xla_buffer_placement"
_GROUPED = ("stablehlo.reduce_scatter", "stablehlo.collective_permute")


def cost_detail(op: Any) -> dict[str, Any]:
    """The attributes that costs are computed from."""
    if op.name == CONSTRAINT:
        return constraint_detail(op)
    if op.name.startswith("stablehlo.all_") or op.name in _GROUPED:
        return replica_groups(op)
    if op.name == "stablehlo.custom_call":
        return _kernel_detail(op) | _placement_detail(op)
    if op.name == "stablehlo.reduce_window":
        window = list(ir.DenseI64ArrayAttr(op.attributes["window_dimensions"]))
        return {"reach": _reach(op, range(len(window)), window, "base_dilations")}
    if op.name != "stablehlo.convolution":
        shift = shift_of(op)
        return {"shift": shift} if shift else {}
    numbers = str(op.attributes["dimension_numbers"])
    inputs, kernel, output = (labels.split(", ") for labels in _CONV_LABELS.findall(numbers))
    spatial = [label for label in kernel if label.isdigit()]
    input_spatial = [inputs.index(label) for label in spatial]
    window = [op.operands[1].type.shape[kernel.index(label)] for label in spatial]
    return {
        "reach": _reach(op, input_spatial, window, "lhs_dilation"),
        "spread": math.prod(_numbers(op, "lhs_dilation", len(window))),
        "strides": _numbers(op, "window_strides", len(window)),
        "input_spatial": input_spatial,
        "output_spatial": [output.index(label) for label in spatial],
        "output_batch": output.index("b"),
        "kernel_spatial": [kernel.index(label) for label in spatial],
        "kernel_input_feature": kernel.index("i"),
        "kernel_output_feature": kernel.index("o"),
        "feature_group_count": ir.IntegerAttr(op.attributes["feature_group_count"]).value,
        "batch_group_count": ir.IntegerAttr(op.attributes["batch_group_count"]).value,
    }


def _kernel_detail(op: Any) -> dict[str, Any]:
    """What is known of the cost of a kernel: "kernel" of `sw.kernel`, "pallas" of a raw one."""
    kernel, raw = read_kernel(op), pallas_cost(op)
    return ({"kernel": kernel} if kernel else {}) | ({"pallas": raw} if raw else {})


def _placement_detail(op: Any) -> dict[str, Any]:
    """The kind of memory that JAX asks for a value ("pinned_host", "device"), as "placement"."""
    if _FRONTEND_ATTRIBUTES not in op.attributes:
        return {}
    told = ir.DictAttr(op.attributes[_FRONTEND_ATTRIBUTES])
    return {"placement": str(ir.StringAttr(told[_PLACEMENT]).value)} if _PLACEMENT in told else {}


def _reach(op: Any, dims: Sequence[int], window: Sequence[int], spread: str) -> dict[int, int]:
    """For each dimension that a window slides over, the elements it needs from a neighbour.

    Where input and output are cut alike, the window of a shard's first output starts as far
    before the shard as the padding, and that of its last output ends the rest of the window, less
    one stride, behind it. `spread` names the attribute that pulls input elements apart.
    """
    count = len(window)
    strides, between = (_numbers(op, name, count) for name in ("window_strides", spread))
    own = "rhs_dilation" if spread == "lhs_dilation" else "window_dilations"
    dilations = _numbers(op, own, count)
    padding = np.zeros((count, 2), dtype=np.int64)
    if "padding" in op.attributes:
        padding = np.array(ir.DenseElementsAttr(op.attributes["padding"])).reshape(count, 2)
    reach = {}
    for i, dim in enumerate(dims):
        span = (window[i] - 1) * dilations[i] + 1
        before = int(padding[i, 0])
        reach[dim] = math.ceil(max(before, span - strides[i] - before, 0) / between[i])
    return reach


def _numbers(op: Any, name: str, count: int) -> list[int]:
    """A number for each dimension of a window; ones where the attribute is not given."""
    given = name in op.attributes
    return list(ir.DenseI64ArrayAttr(op.attributes[name])) if given else [1] * count
