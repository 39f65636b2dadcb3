"""What a client does step by step: upload, ask, follow, fetch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from urllib.parse import quote

import httpx

from shardwright.client_errors import BUSY, Answer, error_of_answer, error_of_transport
from shardwright.client_events import Event
from shardwright.client_exchange import (
    Contact,
    Flow,
    Listen,
    Patience,
    Send,
    Withdraw,
    exchange,
)
from shardwright.client_requests import Asked, labelled
from shardwright.client_resources import Evaluation, Job, JobPage, Uploaded, progress_of
from shardwright.errors import ServiceError, ShardwrightError

if TYPE_CHECKING:
    from shardwright.planner.plan import Plan
    from shardwright.planner.plan_schema import EstimateModel
    from shardwright.planner.program import Program
    from shardwright.planner.search import Progress

Report = Callable[["Progress"], None]
PLANS, EVALUATIONS = "v1/plans", "v1/evaluations"
"""Paths of the kinds of jobs."""


def plan_flow(contact: Contact, ask: Callable[[], Asked], report: Report) -> Flow[Plan]:
    """Asks for a plan and waits for it; withdraws it where the caller is interrupted."""
    asked, job = yield from _ask_and_wait(contact, PLANS, ask, report)
    return (yield from fetch_plan(contact, job, asked))


def evaluate_flow(
    contact: Contact, ask: Callable[[], Asked], report: Report
) -> Flow[EstimateModel]:
    """Asks for the price of a sharding and waits for it."""
    from shardwright.planner.plan_schema import EstimateModel

    _, job = yield from _ask_and_wait(contact, EVALUATIONS, ask, report)
    if job.error is not None:
        raise job.error
    answer = yield from exchange(contact, Send("GET", _path(EVALUATIONS, job.id)))
    return EstimateModel.model_validate(Evaluation.read(answer.json()).estimate)


def _ask_and_wait(
    contact: Contact, kind: str, ask: Callable[[], Asked], report: Report
) -> Flow[tuple[Asked, Job]]:
    from shardwright.planner.search import Progress

    report(Progress("trace"))
    asked = ask()
    job, created = yield from submit(contact, kind, asked)
    try:
        if job.status == "queued":
            report(Progress("queue"))
        if not job.finished:
            job = yield from follow(contact, kind, job.id, report)
    except ServiceError as error:
        do = f"The job {job.id} goes on there"
        if kind == PLANS:
            do += f"; Client.wait({job.id!r}) gets the plan later"
        raise ServiceError(error.what, kind=error.kind, where=error.where, do=do) from None
    except ShardwrightError:
        raise
    except BaseException:
        if created:
            yield Withdraw(_path(kind, job.id))
        raise
    return asked, job


def _path(kind: str, job_id: str, part: str = "") -> str:
    return f"{kind}/{quote(job_id, safe='')}{part}"


def submit(contact: Contact, kind: str, asked: Asked) -> Flow[tuple[Job, bool]]:
    """Asks for a job.

    Returns:
      the job, and whether it is there because of this request.
    """
    answer = yield from post(contact, kind, asked)
    return Job.read(answer.json()), answer.status == 202


def post(contact: Contact, path: str, asked: Asked) -> Flow[Answer]:
    """Uploads the program where there is one and posts the request."""
    body = dict(asked.body)
    if asked.program is not None:
        body["program"] = yield from upload(contact, asked.program.to_stablehlo())
    return (yield from exchange(contact, Send("POST", path, json=body)))


def upload(contact: Contact, data: bytes) -> Flow[str]:
    """Sends a program unless the server has it; returns its id."""
    known = hashlib.sha256(data).hexdigest()
    answer = yield from exchange(contact, Send("GET", f"v1/programs/{known}"), allowed=(404,))
    if answer.status == 404:
        if not answer.is_problem:
            raise error_of_answer(answer)
        answer = yield from exchange(contact, Send("POST", "v1/programs", content=data))
    return Uploaded.read(answer.json()).id


def follow(contact: Contact, kind: str, job_id: str, report: Report) -> Flow[Job]:
    """Reports progress until a job has ended, whatever happens to the connection meanwhile."""
    watch = _Watch(report)
    while True:
        seen = watch.last_id
        answer: Answer | None = None
        lost: ShardwrightError | None = None
        try:
            answer = yield Listen(_path(kind, job_id, "/events"), watch.last_id, watch.on_event)
        except httpx.TransportError as fault:
            lost = error_of_transport(fault, contact.url)
        if watch.final is not None:
            return watch.final
        if answer is not None and answer.status != 204 and answer.status not in BUSY:
            raise error_of_answer(answer)
        # The stream may end for reasons of the network; the job itself tells whether it has.
        job = yield from get(contact, kind, job_id)
        if job.finished:
            return job
        if watch.last_id != seen or watch.patience is None:
            watch.patience = Patience(contact.patience_s)
        if lost is None:
            lost = ServiceError(
                "the server ends the stream of events before the job has ended",
                kind="foreign",
                where=f"{contact.url}/{_path(kind, job_id)}",
                do="Look at it there later; it goes on",
            )
        yield watch.patience.pause(lost, answer.retry_after_s if answer is not None else 0.0)


class _Watch:
    """What has been heard of a job."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self.last_id = ""
        self.final: Job | None = None
        self.patience: Patience | None = None

    def on_event(self, event: Event) -> bool:
        self.last_id = event.id or self.last_id
        try:
            data = json.loads(event.data)
        except ValueError:
            return False
        if event.name == "progress" and isinstance(data, dict):
            self._report(progress_of(data))
        elif event.name == "done":
            self.final = Job.read(data)
        return self.final is not None


def fetch_plan(contact: Contact, job: Job, asked: Asked | None = None) -> Flow[Plan]:
    """The plan of a job that has ended.

    Args:
      asked: what it was asked with, whose pytrees the plan is given.

    Raises:
      ShardwrightError: the job failed or was cancelled; the plan is of another program.
    """
    from shardwright.planner.plan import Plan

    if job.error is not None:
        raise job.error
    where = _path(PLANS, job.id, "/plan.json")
    answer = yield from exchange(contact, Send("GET", where))
    plan = Plan.from_json(answer.body.decode(errors="replace"), where=f"{contact.url}/{where}")
    if asked is None:
        return plan
    plan = labelled(plan, asked)
    return plan if asked.program is None else _of_program(plan, asked.program)


def _of_program(plan: Plan, program: Program) -> Plan:
    """A plan made from an uploaded program, with the pytrees that only this side knows."""
    from shardwright.planner.plan import Plan
    from shardwright.planner.plan_tasks import with_trees

    if plan.data.program.fingerprint != program.fingerprint:
        made, here = plan.data.versions, _versions()
        raise ServiceError(
            f"the server reads the program otherwise than it is here (jaxlib {made.jaxlib} there, "
            f"{here} here)",
            kind="other-program",
            where=program.name,
            do="Use the server's version of jax",
        )
    return Plan(with_trees(plan.data, program), program.in_tree, program.out_tree, program)


def _versions() -> str:
    import jaxlib

    return str(jaxlib.__version__)


def get(contact: Contact, kind: str, job_id: str) -> Flow[Job]:
    """One job."""
    answer = yield from exchange(contact, Send("GET", _path(kind, job_id)))
    return Job.read(answer.json())


def wait(contact: Contact, job_id: str, report: Report) -> Flow[Plan]:
    """The plan of a job that was asked for before, once it is there."""
    job = yield from get(contact, PLANS, job_id)
    if not job.finished:
        job = yield from follow(contact, PLANS, job_id, report)
    return (yield from fetch_plan(contact, job))


def page(contact: Contact, filters: Sequence[tuple[str, str | int | None]]) -> Flow[JobPage]:
    """Some of the plans."""
    params = {key: value for key, value in filters if value is not None}
    answer = yield from exchange(contact, Send("GET", PLANS, params=params))
    return JobPage.read(answer.json())


def cancel(contact: Contact, job_id: str) -> Flow[Job]:
    """Ends a job."""
    answer = yield from exchange(contact, Send("DELETE", _path(PLANS, job_id)))
    return Job.read(answer.json())
