"""One program on many slices, planned by a server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from shardwright.client_exchange import Contact, Flow, Pause, Send, Withdraw, exchange
from shardwright.client_flows import PLANS, fetch_plan, post
from shardwright.client_requests import Asked, ask_plan
from shardwright.client_resources import ComparedSlice, progress_of
from shardwright.client_resources import Comparison as Resource
from shardwright.errors import ShardwrightError

if TYPE_CHECKING:
    from shardwright.planner.comparison import Comparison, SliceProgress
    from shardwright.planner.comparison_rows import ComparisonRow, Goal
    from shardwright.planner.plan import Plan
    from shardwright.planner.plan_schema import Unit
    from shardwright.planner.prices import Prices
    from shardwright.planner.program import Program

_FIRST_PAUSE_S = 0.3
_LONGEST_PAUSE_S = 3.0


class CompareOptions(TypedDict, total=False):
    """The options of a comparison, as those of `shardwright.compare`.

    `options` are those of a reference model.
    """

    topologies: Sequence[str]
    chips: str | None
    options: Mapping[str, Any]
    donate_argnums: int | Sequence[int]
    memory_fraction: float
    time_limit_s: float
    seed: int
    model_flops: float | None
    tokens_per_step: int | None
    unit: Unit
    prices: Prices | str | Path | None
    target_tokens: float | None
    deadline_s: float | None
    budget: float | None
    name: str | None
    on_progress: Callable[[SliceProgress], None] | None


@dataclass(frozen=True)
class Table:
    """A comparison that is asked for, and what this side makes of the plans.

    Attributes:
      asked: what is sent; its plans are labelled with it.
    """

    asked: Asked
    name: str
    unit: Unit
    tokens_per_step: int | None
    prices: Prices | None
    goal: Goal


def ask_comparison(
    target: Callable[..., Any] | Program | str,
    args: Sequence[Any],
    *,
    topologies: Sequence[str] = ("all",),
    chips: str | None = None,
    tokens_per_step: int | None = None,
    unit: Unit = "tokens",
    prices: Prices | str | Path | None = None,
    target_tokens: float | None = None,
    deadline_s: float | None = None,
    budget: float | None = None,
    name: str | None = None,
    on_progress: Callable[[SliceProgress], None] | None = None,
    **options: Any,
) -> Table:
    """A comparison to ask for; the function is traced here.

    Raises:
      InputError: as `shardwright.compare` does, of what can be told without planning.
    """
    from shardwright.planner.comparison_rows import Goal, check_goal
    from shardwright.planner.prices import Prices, load_prices
    from shardwright.planner.slice_choice import choose_slices, parse_chip_range

    priced = prices if isinstance(prices, Prices) or prices is None else load_prices(prices)
    goal = Goal(target_tokens=target_tokens, deadline_s=deadline_s, budget=budget)
    check_goal(goal, tokens_per_step, priced)
    slices = choose_slices(topologies, None if chips is None else parse_chip_range(chips), ())
    asked = ask_plan(
        target, args, topology=slices[0].name, name=name, tokens_per_step=tokens_per_step, **options
    )
    kept = ("model", "memory_fraction", "time_limit_s", "seed")
    body = {key: asked.body[key] for key in kept if key in asked.body}
    body["topologies"] = [on.name for on in slices]
    sent = Asked(body, asked.program, asked.labels)
    own_name = str(target) if asked.program is None else asked.program.name
    return Table(sent, name or own_name, unit, tokens_per_step, priced, goal)


def compare_flow(
    contact: Contact, ask: Callable[[], Table], report: Callable[[SliceProgress], None]
) -> Flow[Comparison]:
    """Asks for a comparison and waits until every slice has its plan or cannot have one."""
    from shardwright.planner.comparison import Comparison, SliceProgress
    from shardwright.planner.comparison_rows import ComparisonModel, find_winners

    table = ask()
    answer = yield from post(contact, "v1/comparisons", table.asked)
    found, created = Resource.read(answer.json()), answer.status == 202
    rows: dict[str, ComparisonRow] = {}
    plans: dict[str, Plan] = {}
    pause = _FIRST_PAUSE_S
    try:
        while True:
            for one in found.rows:
                if one.topology in rows:
                    continue
                if one.finished:
                    rows[one.topology] = yield from _finish(contact, one, table, plans)
                    report(SliceProgress(one.topology, row=rows[one.topology]))
                elif one.progress:
                    report(SliceProgress(one.topology, progress_of(one.progress)))
            if len(rows) == len(found.rows):
                break
            yield Pause(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE_S)
            answer = yield from exchange(contact, Send("GET", f"v1/comparisons/{found.id}"))
            found = Resource.read(answer.json())
    except ShardwrightError:
        raise
    except BaseException:
        if created:
            for one in found.rows:
                if not one.finished:
                    yield Withdraw(f"{PLANS}/{one.id}")
        raise
    ordered = [rows[one.topology] for one in found.rows]
    return Comparison(
        ComparisonModel(
            name=table.name,
            unit=table.unit,
            tokens_per_step=table.tokens_per_step,
            prices=table.prices,
            goal=table.goal,
            rows=ordered,
            winners=find_winners(ordered),
        ),
        plans,
    )


def _finish(
    contact: Contact, one: ComparedSlice, table: Table, plans: dict[str, Plan]
) -> Flow[ComparisonRow]:
    """The row of a slice whose job has ended; keeps its plan where it has one."""
    from shardwright.planner.comparison_rows import row_of_failure, row_of_plan
    from shardwright.planner.workers import Failure, failure_of

    if one.error is None:
        asked = table.asked
        own = Asked({**asked.body, "topology": one.topology}, asked.program, asked.labels)
        plans[one.topology] = yield from fetch_plan(contact, one, own)
        return row_of_plan(
            plans[one.topology].data,
            tokens_per_step=table.tokens_per_step,
            prices=table.prices,
            goal=table.goal,
        )
    kind = (one.problem or {}).get("kind", "crashed")
    failure = failure_of(one.error)
    if kind not in ("input", "does-not-fit", "internal"):
        failure = Failure("crashed", failure.what, failure.where, failure.do)
    return row_of_failure(one.topology, failure)
