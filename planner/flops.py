"""Matrix FLOPs of a program, whatever its sharding."""

from __future__ import annotations

from math import prod

from shardwright.planner.graph import Op, OpGraph


def matrix_flops(graph: OpGraph) -> float:
    """FLOPs of all matrix products, convolutions and kernels in one run (2 a multiply-add)."""
    return sum(op.trips * op_flops(graph, op) for op in graph.ops)


def op_flops(graph: OpGraph, op: Op) -> float:
    """Matrix FLOPs of one run of an operation; 0 for all but dots, convolutions and kernels.

    Those of a raw Pallas kernel are of one device, and are not counted.
    """
    if "kernel" in op.detail:
        flops: float = op.detail["kernel"].needed_flops()
        return flops
    if op.name == "stablehlo.dot_general" and op.rule is not None:
        return 2.0 * prod(op.rule.sizes)
    if op.name == "stablehlo.convolution":
        out = graph.values[op.results[0]].shape
        kernel = graph.values[op.operands[1]].shape
        features = kernel[op.detail["kernel_output_feature"]]
        return 2.0 * float(prod(out)) * float(prod(kernel)) / float(features)
    return 0.0
