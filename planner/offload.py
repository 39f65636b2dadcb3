"""Values that live in the memory of the host, and the transfers over PCIe that take them there.

JAX writes a transfer (`jax.device_put` inside a program, or a checkpoint policy that offloads) as a
custom call `annotate_device_placement` that names a kind of memory. It computes nothing: the
compiler moves the value, and what is made of it by copying alone (a stack that it is written into,
a slice of that stack) lives in the same memory.

Source: XLA, `xla/hlo/transforms/host_offloader.h`: values annotated "pinned_host" are moved to the
  host, with the dynamic-update-slices, slices, bitcasts and loops that they go through, up to the
  annotation "device".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardwright.planner.graph import OpGraph

TARGET = "annotate_device_placement"
TRANSFER = f"custom_call:{TARGET}"
_DEVICE = "device"
_COPIED = dict.fromkeys(
    (
        f"stablehlo.{name}"
        for name in (
            "bitcast_convert", "broadcast_in_dim", "dynamic_slice", "optimization_barrier",
            "reshape", "slice", "transpose",
        )
    ),
    0,
) | {"stablehlo.dynamic_update_slice": 1}  # fmt: skip
"""Operations whose result is in the memory of the host where this operand is."""


@dataclass(frozen=True)
class Transfer:
    """A value that moves between HBM and the host's memory.

    Attributes:
      op: the operation that says so.
      to_host: its direction.
    """

    op: int
    to_host: bool


def transfers(graph: OpGraph) -> Iterator[Transfer]:
    """Every transfer between the memories of device and host, in program order."""
    held = host_values(graph)
    for op in graph.ops:
        if op.name == TRANSFER and (op.operands[0] in held) != (op.results[0] in held):
            yield Transfer(op.id, op.results[0] in held)


def host_values(graph: OpGraph) -> frozenset[int]:
    """The values that live in the memory of the host."""
    held = {
        op.results[0]
        for op in graph.ops
        if op.name == TRANSFER and op.detail.get("placement", _DEVICE) != _DEVICE
    }
    if not held:
        return frozenset()
    before = -1
    while before < len(held):  # a loop's body is read before what it carries is known
        before = len(held)
        for op in graph.ops:
            if op.name in _COPIED and op.operands[_COPIED[op.name]] in held:
                held.add(op.results[0])
        for loop in graph.loops:
            for carry in loop.carries:
                if carry.yielded in held or carry.init in held:
                    held |= {carry.init, carry.argument, carry.yielded, carry.result}
    return frozenset(held)
