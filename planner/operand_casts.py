"""Products that cast an operand inside them, which only two nodes together tell.

A product reads an argument that is cast to fewer bits as it is, cast inside, where the cast value
comes in the sharding in which it is made; where it is moved, it is moved cast, and read so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.planner.fusion import Fusion, FusionPlan
from shardwright.planner.nodes import NodeGraph, Port
from shardwright.planner.op_costs import cast_operands


@dataclass(frozen=True)
class CastRun:
    """A product that casts an operand inside it, if that is not moved.

    Attributes:
      node: of the product.
      what: numbers the different casts.
      operand: the cast value, as the product's node reads it.
      loop: in which the product runs, or -1.
    """

    node: int
    what: int
    operand: Port
    trips: float
    loop: int


def find_casts(
    nodes: NodeGraph, fusions: FusionPlan, kinds: Sequence[int]
) -> tuple[list[tuple[Fusion, int]], list[CastRun]]:
    """The different casts, each as a product and the operand's position, and where they run.

    Args:
      kinds: of the kernels; alike ones take equally long.
    """
    graph = nodes.graph
    numbers: dict[tuple[int, int, int], int] = {}
    casts: list[tuple[Fusion, int]] = []
    runs = []
    for fusion, kind in zip(fusions.fusions, kinds, strict=True):
        op = graph.ops[fusion.ops[0]]
        for position in cast_operands(graph, fusion):
            value = op.operands[position]
            for use in nodes.uses.get(value, ()):
                if (use.op, use.operand) != (op.id, position):
                    continue
                cast = graph.ops[graph.values[value].producer]
                number = numbers.setdefault((kind, position, cast.form), len(numbers))
                if number == len(casts):
                    casts.append((fusion, position))
                runs.append(CastRun(use.port.node, number, use.port, op.trips, op.loop))
    return casts, runs
