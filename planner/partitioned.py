"""Step 6a, its result: what Shardy decided, as plain data.

After propagation and explicit reshards every operation has its real sharding, and every
communication is an operation of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shardwright.planner.collectives import DimAxes, Step


@dataclass(frozen=True)
class Communication:
    """One collective of the partitioned program.

    Attributes:
      step: kind, axes and divisor.
      shape, dtype: the whole tensor, in the type in which it is communicated.
      before, after: its sharding around the collective.
      near: the operation (of the op graph) whose result is communicated, or that reads it.
      trips: runs in one execution of the program.
      loop: innermost loop, or -1.
      prefetchable: it depends on arguments and loop invariants alone.
      read_by: operations that read the result, through other collectives too. A loop reads its
        initial values; its last operation stands for what the body yields, -1 for main's results.
      from_value: the result is a change of this op-graph value's sharding, or -1.
      on_the_way: nothing but further collectives reads the result.
    """

    step: Step
    shape: tuple[int, ...]
    dtype: str
    before: DimAxes
    after: DimAxes
    near: int
    trips: float
    loop: int
    prefetchable: bool
    read_by: tuple[int, ...]
    from_value: int
    on_the_way: bool = False


@dataclass(frozen=True)
class Partitioned:
    """What Shardy made of a program.

    Attributes:
      operands: operation id -> the sharding of each operand as it computes.
      results: operation id -> the sharding of each result, before any reshard.
      values: op-graph value id -> its sharding.
      inputs, outputs: shardings of main's arguments and results.
      communications: every collective, in program order.
    """

    operands: dict[int, tuple[DimAxes, ...]] = field(repr=False)
    results: dict[int, tuple[DimAxes, ...]] = field(repr=False)
    values: dict[int, DimAxes] = field(repr=False)
    inputs: tuple[DimAxes, ...]
    outputs: tuple[DimAxes, ...]
    communications: tuple[Communication, ...]
