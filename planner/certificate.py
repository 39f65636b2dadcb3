"""What is proven about a plan, in words: optimal or within how much, of what, and what is open."""

from __future__ import annotations

import math
from collections import Counter

from shardwright.planner.search import Considered, SearchResult

_AS_GOOD_AS_OPTIMAL = 1.5e-3
"""The bound weighs what hides a little, so that it is up to 0.1 % below an optimal step."""


def certificate(found: SearchResult) -> str:
    """Says how good a plan is proven to be, and what would prove more."""
    sentences = [_of_the_mesh(found), _of_the_evaluation(found), _of_other_meshes(found)]
    sentences += _what_would_tighten(found)
    return " ".join(sentences)


def _of_the_mesh(found: SearchResult) -> str:
    bound, mesh = found.best.bound_s, _shape(found)
    if not math.isfinite(bound):
        return f"Nothing is proven about other shardings on the mesh {mesh}."
    gap = _gap(found)
    least = f"no sharding of this program on the mesh {mesh} takes less than {bound:.5g} s"
    if gap <= _AS_GOOD_AS_OPTIMAL:
        return f"Optimal within {_percent(gap)}: by the integer program {least}."
    told = f"At most {_percent(gap)} above the best: by the integer program {least}."
    if found.best.by_schedule:
        told += " What takes that long by the program takes longer by the schedule than this plan."
    return told


def _gap(found: SearchResult) -> float:
    """How far the step is above the bound, by the integer program; inf where nothing is proven."""
    best = found.best
    step = best.problem.step_seconds(best.solution.choices)
    if not math.isfinite(best.bound_s):
        return math.inf
    return max(0.0, step - best.bound_s) / step if step else 0.0


def _of_the_evaluation(found: SearchResult) -> str:
    best = found.best
    by_program = best.problem.step_seconds(best.solution.choices)
    step = best.evaluation.step_s
    off = abs(step - by_program) / step if step else 0.0
    return (
        f"The partitioned program takes {step:.5g} s, {_percent(off)} from the "
        f"{by_program:.5g} s that the integer program knew."
    )


def _of_other_meshes(found: SearchResult) -> str:
    count = Counter(map(_kind, found.considered))
    told = ", ".join(f"{number} {kind}" for kind, number in sorted(count.items()))
    return f"Of {len(found.considered)} meshes: {told}."


def _what_would_tighten(found: SearchResult) -> list[str]:
    open_meshes = any(_kind(c) == "not tried" for c in found.considered)
    wide = found.best.solution.status != "optimal" and not found.best.by_schedule
    if not (open_meshes or wide):
        return []
    what = " and ".join(
        ["try the other meshes"] * open_meshes + ["narrow what is open on this mesh"] * wide
    )
    return [f"A longer time limit would {what}."]


def _kind(considered: Considered) -> str:
    return considered.status.split(":", maxsplit=1)[0]


def _shape(found: SearchResult) -> str:
    return " x ".join(str(size) for size in found.best.problem.mesh.shape.values())


def _percent(part: float) -> str:
    return f"{100 * part:.2g} %"
