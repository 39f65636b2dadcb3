"""The solver against plain CP-SAT, plain HiGHS and a greedy choice, on the same problems.

    python benchmarks/solver_methods.py INSTANCE.json.gz ... [--time-limit 60]

For each method: final cost, seconds to come within 1% of the best cost that any of them found, and
seconds in all. "Plain" means the program as it is written down, with no reductions: for CP-SAT one
literal a strategy and a pair, for HiGHS the local polytope and a row for each time point.
"""

from __future__ import annotations

import argparse
import datetime
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from ortools.math_opt.python import mathopt
from ortools.sat.python import cp_model

from shardwright.planner.solver import Problem, evaluate, solve
from shardwright.planner.solver.instance_format import read_instance
from shardwright.planner.solver.problem import FORBIDDEN


@dataclass
class Run:
    """What a method found: (seconds, cost) of each feasible improvement, and how it ended."""

    improvements: list[tuple[float, float]] = field(default_factory=list)
    seconds: float = 0.0
    note: str = ""

    @property
    def cost(self) -> float:
        """The best feasible cost."""
        return min((cost for _, cost in self.improvements), default=math.inf)

    def reached(self, cost: float) -> float | None:
        """Seconds until this cost or less."""
        return next((at for at, found in self.improvements if found <= cost), None)


def ours(problem: Problem, limit: float) -> Run:
    """The solver of this project."""
    run = Run()

    def note(seconds: float, cost: float, _: float) -> None:
        if cost < run.cost:
            run.improvements.append((seconds, cost))

    solution = solve(problem, time_limit_s=limit, on_progress=note)
    run.seconds = solution.seconds
    note(solution.seconds, solution.cost if solution.status != "infeasible" else math.inf, 0.0)
    run.note = f"{solution.status}, gap {100 * solution.gap:.3f}%"
    return run


def greedy(problem: Problem, limit: float) -> Run:
    """Node by node, the cheapest strategy given the choices before."""
    del limit
    started = time.perf_counter()
    earlier: list[list[tuple[int, np.ndarray]]] = [[] for _ in problem.costs]
    for edge in problem.edges:
        if edge.a < edge.b:
            earlier[edge.b].append((edge.a, edge.cost))
        else:
            earlier[edge.a].append((edge.b, edge.cost.T))
    choices: list[int] = []
    for node, costs in enumerate(problem.costs):
        total = costs.astype(np.float64)
        for other, table in earlier[node]:
            total = total + table[choices[other]]
        choices.append(int(np.argmin(total)))
    checked = evaluate(problem, choices)
    run = Run(seconds=time.perf_counter() - started)
    if checked.feasible:
        run.improvements.append((run.seconds, checked.cost))
    else:
        over = "forbidden" if math.isinf(checked.cost) else "over the limit"
        run.note = f"{over}, cost {checked.cost:.6g}"
    return run


def cp_sat(problem: Problem, limit: float) -> Run:
    """One literal a strategy and a pair that costs something."""
    started = time.perf_counter()
    model = cp_model.CpModel()
    pick = [[model.new_bool_var("") for _ in costs] for costs in problem.costs]
    objective: list[cp_model.LinearExpr] = []
    for literals, costs in zip(pick, problem.costs, strict=True):
        model.add_exactly_one(literals)
        for literal, cost in zip(literals, costs.tolist(), strict=True):
            if cost >= FORBIDDEN:
                model.add(literal == 0)
            elif cost:
                objective.append(cost * literal)
    for edge in problem.edges:
        for i, row in enumerate(edge.cost.tolist()):
            for j, cost in enumerate(row):
                if cost >= FORBIDDEN:
                    model.add_bool_or(~pick[edge.a][i], ~pick[edge.b][j])
                elif cost:
                    pair = model.new_bool_var("")
                    model.add_bool_or(~pick[edge.a][i], ~pick[edge.b][j], pair)
                    objective.append(cost * pair)
    for used in _live(problem, pick):
        model.add(sum(used) <= int(problem.memory_limit or 0))
    model.minimize(sum(objective))
    run = Run()

    class Note(cp_model.CpSolverSolutionCallback):
        def on_solution_callback(self) -> None:
            run.improvements.append((time.perf_counter() - started, self.objective_value))

    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 2
    solver.parameters.max_time_in_seconds = max(limit - (time.perf_counter() - started), 0.1)
    run.note = solver.status_name(solver.solve(model, Note())).lower()
    run.seconds = time.perf_counter() - started
    return run


def highs(problem: Problem, limit: float) -> Run:
    """Binary strategies, flows for pairs, one row of memory a time point."""
    started = time.perf_counter()
    model = mathopt.Model()
    pick = [[model.add_binary_variable() for _ in costs] for costs in problem.costs]
    objective: list[mathopt.LinearTypes] = []
    for variables, costs in zip(pick, problem.costs, strict=True):
        model.add_linear_constraint(mathopt.fast_sum(variables) == 1)
        for variable, cost in zip(variables, costs.tolist(), strict=True):
            if cost >= FORBIDDEN:
                variable.upper_bound = 0
            else:
                objective.append(cost * variable)
    for edge in problem.edges:
        rows: list[list[mathopt.Variable]] = [[] for _ in pick[edge.a]]
        columns: list[list[mathopt.Variable]] = [[] for _ in pick[edge.b]]
        for i, j in np.argwhere(edge.cost < FORBIDDEN).tolist():
            pair = model.add_variable(lb=0, ub=1)
            rows[i].append(pair)
            columns[j].append(pair)
            objective.append(float(edge.cost[i, j]) * pair)
        for variable, flow in zip([*pick[edge.a], *pick[edge.b]], [*rows, *columns], strict=True):
            model.add_linear_constraint(mathopt.fast_sum(flow) == variable)
    for used in _live(problem, pick):
        model.add_linear_constraint(mathopt.fast_sum(used) <= float(problem.memory_limit or 0))
    model.minimize(mathopt.fast_sum(objective))
    left = max(limit - (time.perf_counter() - started), 0.1)
    built = time.perf_counter() - started
    run = Run()

    def note(lines: list[str]) -> None:
        for line in lines:
            words = line.replace("|", " ").split()
            if len(words) >= 9 and words[-1].endswith("s") and words[-6].endswith(("%", "ge")):
                found = float(words[-7])
                if math.isfinite(found) and found < run.cost:
                    run.improvements.append((built + float(words[-1][:-1]), found))

    result = mathopt.solve(
        model,
        mathopt.SolverType.HIGHS,
        params=mathopt.SolveParameters(time_limit=datetime.timedelta(seconds=left)),
        msg_cb=note,
    )
    run.seconds = time.perf_counter() - started
    run.note = result.termination.reason.name.lower()
    if result.has_primal_feasible_solution() and result.objective_value() < run.cost - 0.5:
        run.improvements.append((run.seconds, result.objective_value()))
    return run


def _live(problem: Problem, pick: list[list]) -> list[list]:  # type: ignore[type-arg]
    """Terms of usage at each time point."""
    live: list[list] = [[] for _ in range(problem.horizon)]  # type: ignore[type-arg]
    for term in problem.memory:
        used = [u * v for u, v in zip(term.usage.tolist(), pick[term.node], strict=True) if u]
        for point in live[term.start : term.end]:
            point += used
    return [used for used in live if used]


METHODS: dict[str, Callable[[Problem, float], Run]] = {
    "shardwright": ours,
    "CP-SAT": cp_sat,
    "HiGHS": highs,
    "greedy": greedy,
}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("instances", type=Path, nargs="+")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds a method")
    options = parser.parse_args()
    for path in options.instances:
        problem = read_instance(path)
        runs = {name: method(problem, options.time_limit) for name, method in METHODS.items()}
        best = min(run.cost for run in runs.values())
        print(f"\n{path.name}: {len(problem.costs)} nodes, best {best:.6g}")
        print(f"{'method':>12} {'cost':>16} {'within 1% at':>13} {'seconds':>8}  end")
        for name, run in runs.items():
            at = run.reached(1.01 * best)
            cost = f"{run.cost:.10g}" if math.isfinite(run.cost) else "none"
            reached = "never" if at is None else f"{at:.1f} s"
            print(f"{name:>12} {cost:>16} {reached:>13} {run.seconds:>8.1f}  {run.note}")


if __name__ == "__main__":
    main()
