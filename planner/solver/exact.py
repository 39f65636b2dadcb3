"""The integer program as a mixed-integer model, solved by HiGHS through OR-Tools MathOpt."""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from ortools.math_opt.python import mathopt
from shardwright.planner.solver.network import Network


@dataclass(frozen=True)
class ExactResult:
    """Choices by node of the network (None where none was found), and a lower bound on the cost."""

    choices: list[int] | None
    bound: float
    infeasible: bool


@dataclass(frozen=True)
class _Model:
    model: mathopt.Model
    pick: dict[int, list[mathopt.Variable]]


def solve_exact(
    network: Network, *, time_limit_s: float, hint: Sequence[int] | None = None, gap: float = 0.0
) -> ExactResult:
    """Minimise over what is left of `network`.

    Args:
      network: after reductions.
      time_limit_s: seconds that the MIP solver may take.
      hint: a start, by node.
      gap: relative gap at which to stop.
    """
    built = _build(network)
    parameters = mathopt.SolveParameters(
        time_limit=datetime.timedelta(seconds=max(time_limit_s, 0.01)),
        relative_gap_tolerance=gap,
        absolute_gap_tolerance=0.0,
    )
    model_parameters = mathopt.ModelSolveParameters()
    if hint is not None:
        values = {
            variable: float(choice == hint[node])
            for node, variables in built.pick.items()
            for choice, variable in enumerate(variables)
        }
        model_parameters.solution_hints.append(mathopt.SolutionHint(variable_values=values))
    result = mathopt.solve(
        built.model, mathopt.SolverType.HIGHS, params=parameters, model_params=model_parameters
    )
    infeasible = result.termination.reason == mathopt.TerminationReason.INFEASIBLE
    bound = math.inf if infeasible else result.dual_bound()
    if not result.has_primal_feasible_solution():
        return ExactResult(None, bound, infeasible)
    values = result.variable_values()
    choices = [0] * len(network.unary)
    for node, variables in built.pick.items():
        choices[node] = int(np.argmax([values[v] for v in variables]))
    return ExactResult(choices, bound, False)


def _build(network: Network) -> _Model:
    """One binary a strategy; one flow variable a pair that may be chosen and costs something."""
    model = mathopt.Model()
    pick: dict[int, list[mathopt.Variable]] = {}
    objective: list[mathopt.LinearTerm] = []
    for node in network.alive():
        costs = network.costs(node)
        pick[node] = [
            model.add_binary_variable(name="")
            if math.isfinite(c)
            else model.add_variable(lb=0, ub=0)
            for c in costs
        ]
        model.add_linear_constraint(mathopt.fast_sum(pick[node]) == 1.0)
        objective += [c * v for c, v in zip(costs, pick[node], strict=True) if math.isfinite(c)]
    for a in network.alive():
        for b, table in network.tables[a].items():
            if a < b:
                objective += _add_edge(model, pick[a], pick[b], table)
    _add_memory(model, network, pick)
    model.minimize(mathopt.fast_sum(objective) + network.constant)
    return _Model(model, pick)


def _add_edge(
    model: mathopt.Model,
    rows: list[mathopt.Variable],
    columns: list[mathopt.Variable],
    table: np.ndarray,
) -> list[mathopt.LinearTerm]:
    """Pairs as flow from rows to columns: the local polytope."""
    objective = []
    row_flow: list[list[mathopt.Variable]] = [[] for _ in rows]
    column_flow: list[list[mathopt.Variable]] = [[] for _ in columns]
    for i, j in zip(*np.nonzero(np.isfinite(table)), strict=True):
        pair = model.add_variable(lb=0.0, ub=1.0)
        row_flow[i].append(pair)
        column_flow[j].append(pair)
        if table[i, j]:
            objective.append(table[i, j] * pair)
    for variable, flow in zip([*rows, *columns], [*row_flow, *column_flow], strict=True):
        model.add_linear_constraint(mathopt.fast_sum(flow) == variable)
    return objective


def _add_memory(
    model: mathopt.Model, network: Network, pick: dict[int, list[mathopt.Variable]]
) -> None:
    live: list[list[mathopt.LinearTerm]] = [[] for _ in network.slack]
    for node, variables in pick.items():
        for term in network.terms[node]:
            used = [u * v for u, v in zip(term.usage, variables, strict=True) if u]
            for time in range(term.start, term.end):
                live[time] += used
    for slack, used in zip(network.slack, live, strict=True):
        if used:
            model.add_linear_constraint(mathopt.fast_sum(used) <= slack)
