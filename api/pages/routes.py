"""The pages: plans with live progress, one plan, comparisons, a form, sign-in."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import RedirectResponse
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool

from shardwright.api.access import KEY_COOKIE, Caller
from shardwright.api.context import Here
from shardwright.api.pages import comparison, session, views
from shardwright.api.pages.forms import DEFAULTS, read_request
from shardwright.api.pages.plan_page import plan_view
from shardwright.api.pages.render import page, static_asset
from shardwright.api.problems import KINDS, Problem, not_found, problem
from shardwright.api.schemas import COMPARISON_ID, PLAN_ID, ComparisonRequest
from shardwright.api.store import Comparison, Job, QueueFullError, QuotaExceededError
from shardwright.errors import ShardwrightError

Visitor = Annotated[Caller, Depends(session.visitor)]
PlanId = Annotated[str, Path(pattern=PLAN_ID)]
ComparisonId = Annotated[str, Path(pattern=COMPARISON_ID)]
_A_PAGE = 50
_STATUSES = tuple(views.STATUS_SIGNS)
_LONGEST_KEY = 200
_YEAR_S = 365 * 86_400


class _PageRoute(APIRoute):
    """Answers errors with pages, and sends who is not signed in to the sign-in."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def with_pages(request: Request) -> Response:
            try:
                return await handle(request)
            except session.SignInNeededError:
                if request.method == "GET" and session.from_another_site(request):
                    return await page(request, "same_again.html")
                return _redirect(f"/sign-in?then={request.url.path}")
            except RequestValidationError:
                return await _error_page(request, not_found("page", request.url.path))
            except (ShardwrightError, Problem, QueueFullError, QuotaExceededError) as error:
                return await _error_page(request, as_problem(error))

        return with_pages


def as_problem(error: Exception) -> Problem:
    """An error of the store or of an input as a problem."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, QueueFullError):
        return problem("queue-full", "as many jobs wait as may", do="Try again in a while")
    if isinstance(error, QuotaExceededError):
        return problem(
            "quota-exceeded",
            "the key has asked for as many plans as it may in 24 hours",
            do=f"Try again after {error.until.isoformat(timespec='minutes')}",
        )
    assert isinstance(error, ShardwrightError)
    return Problem("input", error)


async def _error_page(request: Request, found: Problem) -> Response:
    status, title = KINDS[found.kind]
    caller = await request.app.state.gate.caller(request.cookies.get(KEY_COOKIE))
    return await page(
        request, "problem.html", status, caller=caller, title=title, error=found.error
    )


def _redirect(to: str) -> Response:
    return RedirectResponse(to, 303, headers={"Cache-Control": "no-store"})


pages_router = APIRouter(route_class=_PageRoute, include_in_schema=False)


@pages_router.get("/")
async def plans(
    request: Request,
    here: Here,
    caller: Visitor,
    status: Annotated[str, Query(max_length=20)] = "",
    topology: Annotated[str, Query(max_length=64)] = "",
    model: Annotated[str, Query(max_length=64)] = "",
    cursor: Annotated[str | None, Query(max_length=400)] = None,
) -> Response:
    """Plans of the visitor's owner, newest first."""
    wanted = {
        "status": status if status in _STATUSES else None,
        "topology": _printable(topology) or None,
        "model": _printable(model) or None,
    }
    jobs, after = await run_in_threadpool(
        lambda: here.store.jobs.page(
            caller.owner,
            status=wanted["status"],
            topology=wanted["topology"],
            model=wanted["model"],
            cursor=cursor,
            limit=_A_PAGE,
        )
    )
    return await page(
        request,
        "plans.html",
        caller=caller,
        rows=[views.plan_row(job) for job in jobs],
        live=any(not job.is_final for job in jobs),
        statuses=_STATUSES,
        wanted=wanted,
        filtered=any(wanted.values()),
        after=after,
        trouble=here.runner.trouble(),
    )


@pages_router.get("/plans/{plan_id}")
async def plan(request: Request, here: Here, caller: Visitor, plan_id: PlanId) -> Response:
    """One plan: its progress, why it failed, or everything about it."""
    job = await _job(here, caller, plan_id)
    shown = await run_in_threadpool(plan_view, here.store, job)
    return await page(request, "plan.html", caller=caller, trouble=here.runner.trouble(), **shown)


@pages_router.post("/plans/{plan_id}/cancel")
async def cancel(request: Request, here: Here, caller: Visitor, plan_id: PlanId) -> Response:
    """Cancels a plan and shows it."""
    await session.read_form(request)
    _check_may_plan(caller)
    if await run_in_threadpool(here.store.jobs.cancel, caller.owner, plan_id) is None:
        raise not_found("plan", plan_id)
    here.runner.wake()
    return _redirect(f"/plans/{plan_id}")


@pages_router.post("/plans/{plan_id}/again")
async def again(request: Request, here: Here, caller: Visitor, plan_id: PlanId) -> Response:
    """Plans anew what failed or was cancelled."""
    await session.read_form(request)
    _check_may_plan(caller)
    job = await _job(here, caller, plan_id)
    made = await run_in_threadpool(_submit, here, caller, dict(job.request))
    return _redirect(f"/plans/{made.id}")


@pages_router.get("/new")
async def new(request: Request, caller: Visitor) -> Response:
    """The form; fields in the query fill it in."""
    _check_may_plan(caller)
    given = {name: request.query_params.get(name, value) for name, value in DEFAULTS.items()}
    return await _form(request, caller, given)


@pages_router.post("/new")
async def ask(request: Request, here: Here, caller: Visitor) -> Response:
    """Queues what the form asks for and shows it, or the form again with what is wrong."""
    fields = await session.read_form(request)
    _check_may_plan(caller)
    try:
        body = read_request(fields)
        if isinstance(body, ComparisonRequest):
            made = await run_in_threadpool(_compare, here, caller, body)
            return _redirect(f"/comparisons/{made.id}")
        wanted = await run_in_threadpool(here.checker.plan, caller.owns, body)
        job = await run_in_threadpool(_submit, here, caller, wanted)
    except (ShardwrightError, Problem, QueueFullError, QuotaExceededError) as error:
        return await _form(request, caller, DEFAULTS | dict(fields), as_problem(error))
    return _redirect(f"/plans/{job.id}")


async def _form(
    request: Request, caller: Caller, given: dict[str, str], wrong: Problem | None = None
) -> Response:
    return await page(
        request,
        "new.html",
        status=200 if wrong is None else KINDS[wrong.kind][0],
        caller=caller,
        given=given,
        error=None if wrong is None else wrong.error,
        models=views.model_choices(),
        slices=views.slice_choices(),
    )


@pages_router.get("/comparisons")
async def comparisons(request: Request, here: Here, caller: Visitor) -> Response:
    """Comparisons of the visitor's owner, newest first."""
    found = await run_in_threadpool(here.store.comparisons.list, caller.owner)
    rows = [comparison.listed(one) for one in found]
    return await page(request, "comparisons.html", caller=caller, rows=rows)


@pages_router.get("/comparisons/{comparison_id}")
async def compare(
    request: Request, here: Here, caller: Visitor, comparison_id: ComparisonId
) -> Response:
    """One comparison: a row a slice, and charts."""
    found = await run_in_threadpool(here.store.comparisons.get, caller.owner, comparison_id)
    if found is None:
        raise not_found("comparison", comparison_id)
    shown = await run_in_threadpool(comparison.comparison_view, here.store, found, here.prices)
    return await page(request, "comparison.html", caller=caller, **shown)


@pages_router.get("/sign-in")
async def sign_in(request: Request, then: Annotated[str, Query(max_length=200)] = "/") -> Response:
    """The form that takes a key."""
    return await page(request, "sign_in.html", then=_own_path(then), wrong="")


@pages_router.post("/sign-in")
async def take_key(request: Request) -> Response:
    """Signs in with a key, or says that it is not a good one."""
    fields = await session.read_form(request)
    key, then = fields.get("key", "").strip()[:_LONGEST_KEY], _own_path(fields.get("then", "/"))
    if await request.app.state.gate.caller(key) is None:
        wrong = "The key is unknown or revoked. `shardwright keys create` makes one."
        return await page(request, "sign_in.html", 401, then=then, wrong=wrong)
    response = _redirect(then)
    session.keep_key(request, response, key)
    return response


@pages_router.post("/sign-out")
async def sign_out(request: Request) -> Response:
    """Forgets the key."""
    await session.read_form(request)
    response = _redirect("/sign-in")
    session.forget_key(response)
    return response


@pages_router.get("/static/{name}")
async def static(request: Request, name: Annotated[str, Path(max_length=40)]) -> Response:
    """Style sheets and scripts; addresses with the version in them never change."""
    found = await run_in_threadpool(static_asset, name)
    if found is None:
        raise not_found("page", request.url.path)
    content, media_type = found
    kept = f"public, max-age={_YEAR_S}, immutable" if request.url.query else "no-cache"
    headers = {"Cache-Control": kept, "X-Content-Type-Options": "nosniff"}
    return Response(content, headers=headers, media_type=media_type)


def _printable(text: str) -> str:
    """A text without control characters, which no name has and of which Postgres takes no NUL."""
    return "".join(filter(str.isprintable, text)).strip()


def _own_path(then: str) -> str:
    """A path of this server to go on to; "/" for anything else."""
    ours = then.startswith("/") and not then.startswith(("//", "/\\")) and then.isprintable()
    return then if ours else "/"


def _check_may_plan(caller: Caller) -> None:
    if not caller.may("plan"):
        raise problem(
            "forbidden",
            "the key lacks the scope plan",
            where="key",
            do="Sign in with a key that was made with --scope plan",
        )


async def _job(here: Here, caller: Caller, plan_id: str) -> Job:
    job = await run_in_threadpool(here.store.jobs.get, caller.owner, plan_id)
    if job is None:
        raise not_found("plan", plan_id)
    return job


def _submit(here: Here, caller: Caller, wanted: dict[str, Any]) -> Job:
    job, _ = here.store.jobs.submit(
        caller.owns,
        "plan",
        wanted,
        here.settings.queue_limit,
        key_id=caller.key_id,
        quota_per_day=caller.plan_quota_per_day,
    )
    here.runner.wake()
    return job


def _compare(here: Here, caller: Caller, body: ComparisonRequest) -> Comparison:
    wanted, plans = here.checker.comparison(caller.owns, body)
    made, _ = here.store.comparisons.create(
        caller.owns,
        wanted,
        plans,
        here.settings.queue_limit,
        key_id=caller.key_id,
        quota_per_day=caller.plan_quota_per_day,
    )
    here.runner.wake()
    return made
