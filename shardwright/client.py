"""A client of the planning service.

    client = sw.Client("https://planner.example.com", api_key)
    plan = client.plan(train_step, state, batch, topology="v5e:16x16", donate_argnums=(0,))
    step = plan.jit(train_step)

Functions are traced here and sent as StableHLO; the plan runs like one that was made here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

import anyio
import httpx

from shardwright import client_flows as flows
from shardwright.client_compare import CompareOptions, ask_comparison, compare_flow
from shardwright.client_errors import Answer
from shardwright.client_events import EventParser
from shardwright.client_exchange import Contact, Flow, Listen, Pause, Send, Step, Withdraw
from shardwright.client_http import (
    answer_of,
    checked_url,
    is_stream,
    listening,
    request,
    settings,
)
from shardwright.client_requests import (
    EvaluateOptions,
    PlanOptions,
    ask_evaluation,
    ask_plan,
)
from shardwright.client_resources import Job, JobPage

if TYPE_CHECKING:
    from shardwright.planner.comparison import Comparison
    from shardwright.planner.plan import Plan
    from shardwright.planner.plan_schema import EstimateModel
    from shardwright.planner.program import Program
    from shardwright.planner.search import Progress

T = TypeVar("T")
_WITHDRAW_S = 5.0


class Client:
    """A blocking client; use it in a `with` block, or close it."""

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        timeout_s: float = 30.0,
        patience_s: float = 120.0,
    ) -> None:
        """Connects when first used.

        Args:
          url: of the server, such as "https://planner.example.com".
          api_key: where the server has keys.
          timeout_s: how long the server may take for one answer.
          patience_s: how long to try again while the server is busy or, once it has been reached,
            away.

        Raises:
          InputError: this is not the URL of a server, or the key cannot be one.
        """
        self._contact = Contact(checked_url(url), patience_s)
        self._http = httpx.Client(**settings(self._contact.url, api_key, timeout_s))

    def plan(
        self,
        target: Callable[..., Any] | Program | str,
        *args: Any,
        **options: Unpack[PlanOptions],
    ) -> Plan:
        """Plans a program on the server, as `shardwright.plan` does here.

        A function is traced here; its StableHLO, with the lines of its source that operations come
        from, is what is sent. An interrupt cancels the plan, unless others had asked for it before.

        Args:
          target: a function of `args`, a `Program`, or the name of a reference model.
          args: arrays or `jax.ShapeDtypeStruct`s, any pytrees.
          options: as for `shardwright.plan`; for a reference model also `options`, which are its
            own, as {"batch": 256}.

        Raises:
          InputError: the slice, the function, the mesh or a pin is wrong.
          DoesNotFitError: no plan keeps within the memory.
          ServiceError: the server cannot be reached, refuses, or failed at it.
        """
        return self._run(_plan(self._contact, target, args, options))

    def compare(
        self,
        target: Callable[..., Any] | Program | str,
        *args: Any,
        **options: Unpack[CompareOptions],
    ) -> Comparison:
        """Plans one program on many slices on the server, as `shardwright.compare` does here.

        Args:
          target, args: as for `plan`.
          options: as for `shardwright.compare`, but for `chip` and `workers`; for a reference
            model also `options`. A server takes only so many slices at once.

        Raises:
          InputError: the function does not trace, a pattern names no slice, or the goal cannot
            be judged with what is given.
          ServiceError: the server cannot be reached, or refuses.
        """
        return self._run(_compare(self._contact, target, args, options))

    def evaluate(
        self,
        target: Callable[..., Any] | Program | str,
        *args: Any,
        **options: Unpack[EvaluateOptions],
    ) -> EstimateModel:
        """Prices a sharding on the server, as `shardwright.evaluate` does here.

        Args:
          target, args: as for `plan`.
          options: as for `shardwright.evaluate`. For a reference model also `options`, and its
            specs are dicts from patterns of paths ("*" is any text) to PartitionSpecs.

        Raises:
          InputError: the slice, the function, the mesh or a spec is wrong.
          ServiceError: the server cannot be reached, refuses, or failed at it.
        """
        return self._run(_evaluate(self._contact, target, args, options))

    def submit(
        self,
        target: Callable[..., Any] | Program | str,
        *args: Any,
        **options: Unpack[PlanOptions],
    ) -> Job:
        """Asks for a plan as `plan` does, without waiting for it."""
        asked = ask_plan(target, args, **options)
        return self._run(flows.submit(self._contact, flows.PLANS, asked))[0]

    def wait(self, plan_id: str, *, on_progress: Callable[[Progress], None] | None = None) -> Plan:
        """A plan that was asked for before, once it is there; raises as `plan` does."""
        return self._run(flows.wait(self._contact, plan_id, on_progress or _silent))

    def get(self, plan_id: str) -> Job:
        """How far a plan is.

        Raises:
          InputError: there is none of this id for this key.
        """
        return self._run(flows.get(self._contact, flows.PLANS, plan_id))

    def list(
        self,
        *,
        status: str | None = None,
        topology: str | None = None,
        model: str | None = None,
        cursor: str | None = None,
        limit: int | None = None,
    ) -> JobPage:
        """Plans of this key, newest first; `cursor` of one page leads to the next."""
        return self._run(_page(self._contact, status, topology, model, cursor, limit))

    def cancel(self, plan_id: str) -> Job:
        """Ends a plan that is queued or running."""
        return self._run(flows.cancel(self._contact, plan_id))

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, flow: Flow[T]) -> T:
        resume: Callable[[], Step] = partial(next, flow)
        while True:
            try:
                step = resume()
            except StopIteration as done:
                return done.value  # type: ignore[no-any-return]
            try:
                result = self._do(step)
            except BaseException as fault:
                resume = partial(flow.throw, fault)
            else:
                resume = partial(flow.send, result)

    def _do(self, step: Step) -> Answer | None:
        match step:
            case Pause(seconds):
                time.sleep(seconds)
                return None
            case Withdraw(path):
                self._http.delete(path, timeout=_WITHDRAW_S)
                return None
            case Listen():
                return self._listen(step)
            case Send():
                return answer_of(self._http.send(request(self._http, step)))

    def _listen(self, step: Listen) -> Answer | None:
        with self._http.stream("GET", step.path, **listening(step, self._http.timeout)) as events:
            if not is_stream(events):
                events.read()
                return answer_of(events)
            parser = EventParser()
            for text in events.iter_text():
                if any(step.on_event(event) for event in parser.feed(text)):
                    break
            return None


class AsyncClient:
    """The same for asyncio; use it in an `async with` block, or close it.

    Functions are traced by the task that asks, since JAX keeps its settings by thread: where the
    event loop must not wait for that, trace a `Program` in a thread and pass it.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        timeout_s: float = 30.0,
        patience_s: float = 120.0,
    ) -> None:
        """As `Client`."""
        self._contact = Contact(checked_url(url), patience_s)
        self._http = httpx.AsyncClient(**settings(self._contact.url, api_key, timeout_s))

    async def plan(
        self,
        target: Callable[..., Any] | Program | str,
        *args: Any,
        **options: Unpack[PlanOptions],
    ) -> Plan:
        """As `Client.plan`; cancelling the task cancels the plan."""
        return await self._run(_plan(self._contact, target, args, options))

    async def compare(
        self,
        target: Callable[..., Any] | Program | str,
        *args: Any,
        **options: Unpack[CompareOptions],
    ) -> Comparison:
        """As `Client.compare`."""
        return await self._run(_compare(self._contact, target, args, options))

    async def evaluate(
        self,
        target: Callable[..., Any] | Program | str,
        *args: Any,
        **options: Unpack[EvaluateOptions],
    ) -> EstimateModel:
        """As `Client.evaluate`."""
        return await self._run(_evaluate(self._contact, target, args, options))

    async def submit(
        self,
        target: Callable[..., Any] | Program | str,
        *args: Any,
        **options: Unpack[PlanOptions],
    ) -> Job:
        """As `Client.submit`."""
        asked = ask_plan(target, args, **options)
        return (await self._run(flows.submit(self._contact, flows.PLANS, asked)))[0]

    async def wait(
        self, plan_id: str, *, on_progress: Callable[[Progress], None] | None = None
    ) -> Plan:
        """As `Client.wait`."""
        return await self._run(flows.wait(self._contact, plan_id, on_progress or _silent))

    async def get(self, plan_id: str) -> Job:
        """As `Client.get`."""
        return await self._run(flows.get(self._contact, flows.PLANS, plan_id))

    async def list(
        self,
        *,
        status: str | None = None,
        topology: str | None = None,
        model: str | None = None,
        cursor: str | None = None,
        limit: int | None = None,
    ) -> JobPage:
        """As `Client.list`."""
        return await self._run(_page(self._contact, status, topology, model, cursor, limit))

    async def cancel(self, plan_id: str) -> Job:
        """As `Client.cancel`."""
        return await self._run(flows.cancel(self._contact, plan_id))

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _run(self, flow: Flow[T]) -> T:
        resume: Callable[[], Step] = partial(next, flow)
        while True:
            try:
                step = resume()
            except StopIteration as done:
                return done.value  # type: ignore[no-any-return]
            try:
                result = await self._do(step)
            except BaseException as fault:
                resume = partial(flow.throw, fault)
            else:
                resume = partial(flow.send, result)

    async def _do(self, step: Step) -> Answer | None:
        match step:
            case Pause(seconds):
                await anyio.sleep(seconds)
                return None
            case Withdraw(path):
                # The task is being cancelled; without a shield nothing can be sent any more.
                with anyio.move_on_after(_WITHDRAW_S, shield=True):
                    await self._http.delete(path)
                return None
            case Listen():
                return await self._listen(step)
            case Send():
                return answer_of(await self._http.send(request(self._http, step)))

    async def _listen(self, step: Listen) -> Answer | None:
        options = listening(step, self._http.timeout)
        async with self._http.stream("GET", step.path, **options) as events:
            if not is_stream(events):
                await events.aread()
                return answer_of(events)
            parser = EventParser()
            async for text in events.aiter_text():
                if any(step.on_event(event) for event in parser.feed(text)):
                    break
            return None


def _silent(progress: object) -> None:
    """Reports to nobody."""


def _plan(contact: Contact, target: Any, args: tuple[Any, ...], options: PlanOptions) -> Flow[Plan]:
    report = options.get("on_progress") or _silent
    return flows.plan_flow(contact, lambda: ask_plan(target, args, **options), report)


def _compare(
    contact: Contact, target: Any, args: tuple[Any, ...], options: CompareOptions
) -> Flow[Comparison]:
    report = options.get("on_progress") or _silent
    return compare_flow(contact, lambda: ask_comparison(target, args, **options), report)


def _evaluate(
    contact: Contact, target: Any, args: tuple[Any, ...], options: EvaluateOptions
) -> Flow[EstimateModel]:
    return flows.evaluate_flow(contact, lambda: ask_evaluation(target, args, **options), _silent)


def _page(
    contact: Contact,
    status: str | None,
    topology: str | None,
    model: str | None,
    cursor: str | None,
    limit: int | None,
) -> Flow[JobPage]:
    filters = [("status", status), ("topology", topology), ("model", model)]
    return flows.page(contact, [*filters, ("cursor", cursor), ("limit", limit)])
