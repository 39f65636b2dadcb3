"""What people who shard by hand would begin with, as choices of the integer program.

A family of hand-made shardings says which mesh axes cut the batch and which the state (parameters
and moments); which dimension of each parameter is cut, and everything between, is completed by the
integer program itself. The best of a family costs no more than any hand-made sharding in it.

Sources:
  data parallel; FSDP: Rajbhandari et al., ZeRO (2020), section 5.
  tensor parallel: Shoeybi et al., Megatron-LM (2019), section 3.
  sequence: Korthikanti et al., Reducing Activation Recomputation (2022), section 4.2.
  spatial: Jin et al., Spatial parallelism (GShard, Lepikhin et al. 2020, section 3.4, alike).
  expert: Lepikhin et al., GShard (2020), section 3.2.
  pipeline: Huang et al., GPipe (2019), section 2; Xu et al., GSPMD (2021), section 3.3.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from shardwright.planner.problem import ShardingProblem
from shardwright.planner.solver import Problem, solve
from shardwright.planner.solver.restricted import restrict_rows
from shardwright.planner.strategies import IntArray

Axes = tuple[int, ...]
_GAP = 0.02
"""They are to begin with."""


@dataclass(frozen=True)
class Family:
    """A kind of hand-made sharding on the axes of a mesh, by number.

    Attributes:
      batch: axes that cut the first dimension of what a step is fed.
      second: axes that cut its second dimension (sequence, height).
      together: groups of axes that cut one dimension of a parameter, or none; others cut none.
      stages: axes that cut the first dimension of a parameter, that of the stacked layers.
    """

    name: str
    batch: Axes
    second: Axes
    together: tuple[Axes, ...]
    stages: Axes = ()


def families(axes: int, *, pipelined: bool = False) -> Iterator[Family]:
    """The families on a mesh of so many axes.

    Args:
      pipelined: whether the program shifts a buffer as a pipeline does, whose stages an axis cuts.
    """
    every = tuple(range(axes))
    yield Family("FSDP", every, (), (every,))
    yield Family("data parallel", every, (), ())
    for count in range(1, axes):
        for data in combinations(every, count):
            model = tuple(a for a in every if a not in data)
            yield Family("FSDP x tensor", data, (), (data, model))
            yield Family("expert", every, (), (data, model))
            yield Family("tensor parallel", data, (), (model,))
            yield Family("sequence or spatial", data, model, (every,))
    for stage in every if pipelined else ():
        rest = tuple(axis for axis in every if axis != stage)
        yield Family("pipeline", rest, (), (rest,) if rest else (), (stage,))


def is_pipelined(problem: ShardingProblem) -> bool:
    """Whether a loop of the program shifts what it carries along a dimension."""
    return any("shift" in op.detail and op.loop >= 0 for op in problem.node_graph.graph.ops)


def family_rows(problem: ShardingProblem, family: Family) -> dict[int, IntArray]:
    """The strategies that a family leaves to each argument that it says something about.

    Arguments that cannot be cut so keep all their strategies. Without donated arguments nothing
    tells the state from the batch, and nothing is said.
    """
    graph = problem.node_graph.graph
    kept = set(graph.aliases.values())
    found = {}
    for position, node in enumerate(problem.node_graph.argument_nodes if kept else ()):
        rows = problem.strategies[node]
        allowed = _of_state(rows, family) if position in kept else _of_batch(rows, family)
        if allowed.any() and not allowed.all():
            found[node] = np.flatnonzero(allowed)
    return found


def expert_starts(
    problem: ShardingProblem,
    program: Problem,
    classes: Sequence[int] | None,
    *,
    deadline: float,
    seed: int,
) -> list[tuple[int, ...]]:
    """Choices of the integer program, the best found of each family, as far as the time goes.

    Args:
      program: the integer program, with alike nodes tied where there are `classes`.
      classes: for each node of the problem its node in the program.
      deadline: on the clock of `time.perf_counter`.
    """
    found = []
    every = list(families(len(problem.mesh.shape), pipelined=is_pipelined(problem)))
    for place, family in enumerate(every):
        left = (deadline - time.perf_counter()) / (len(every) - place)
        if left <= 0:
            break
        rows = family_rows(problem, family)
        if not rows:
            continue
        small = restrict_rows(program, _by_class(rows, classes))
        solution = solve(small.problem, time_limit_s=left, gap=_GAP, seed=seed)
        if solution.status != "infeasible":
            found.append(small.lift(solution.choices))
    return found


def _by_class(rows: Mapping[int, IntArray], classes: Sequence[int] | None) -> dict[int, IntArray]:
    return {node if classes is None else classes[node]: kept for node, kept in rows.items()}


def _of_batch(rows: IntArray, family: Family) -> NDArray[np.bool_]:
    wanted = np.full(rows.shape[1], -1)
    wanted[list(family.batch)] = 0
    wanted[list(family.second)] = 1
    allowed: NDArray[np.bool_] = (rows == wanted).all(axis=1)
    return allowed


def _of_state(rows: IntArray, family: Family) -> NDArray[np.bool_]:
    allowed = np.ones(len(rows), dtype=bool)
    grouped = {axis for group in family.together for axis in group}
    for axis in set(range(rows.shape[1])) - grouped:
        allowed &= rows[:, axis] == (0 if axis in family.stages else -1)
    for group in family.together:
        allowed &= (rows[:, list(group)] == rows[:, group[:1]]).all(axis=1)
    return allowed
