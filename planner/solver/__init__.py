"""Chooses one strategy a node at least cost within a memory limit; knows nothing of sharding."""

from shardwright.planner.solver.problem import Edge, Evaluation, MemoryTerm, Problem, evaluate
from shardwright.planner.solver.solve import Solution, solve

__all__ = ["Edge", "Evaluation", "MemoryTerm", "Problem", "Solution", "evaluate", "solve"]
