"""How pages are made and sent: templates with everything escaped, and a strict policy."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from typing import Any

from fastapi import Request, Response
from fastapi.responses import HTMLResponse
from jinja2 import ChoiceLoader, Environment, PackageLoader
from starlette.concurrency import run_in_threadpool

from shardwright.api.access import Caller
from shardwright.api.pages.session import form_token, keep_form_token, signed_in
from shardwright.reports.page import asset, plotly_js
from shardwright.reports.sections import environment as report_environment
from shardwright.version import VERSION

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; style-src-attr 'unsafe-inline'; "
    "img-src 'self' data:; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'"
)
"""Scripts and style sheets are files of the server; charts set styles of single elements."""

_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_OWN_ASSETS = frozenset({"pages.css", "pages.js", "icon.svg"})
_REPORT_ASSETS = frozenset({"report.css", "report.js"})


@cache
def environment() -> Environment:
    """The templates of the pages and of the reports, with the formats of the reports."""
    made = report_environment().overlay(
        loader=ChoiceLoader(
            [
                PackageLoader("shardwright.api.pages", "templates"),
                PackageLoader("shardwright.reports", "templates"),
            ]
        )
    )
    made.filters |= {"when": _when, "sentence": _sentence}
    return made


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def _when(at: datetime) -> str:
    return at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


async def page(
    request: Request, template: str, status: int = 200, caller: Caller | None = None, **context: Any
) -> Response:
    """A page; its template also has the version, the form's token and whether to offer sign-out."""
    token = form_token(request)
    shown = {
        "version": VERSION,
        "form_token": token,
        "signed_in": caller is not None and await signed_in(request),
        "visitor": caller is not None,
        "may_plan": caller is not None and caller.may("plan"),
        "path": request.url.path,
        "style_marks": style_marks(),
        **context,
    }
    text = await run_in_threadpool(environment().get_template(template).render, shown)
    response = HTMLResponse(text, status, headers=_HEADERS)
    keep_form_token(request, response, token)
    return response


@cache
def style_marks() -> tuple[str, ...]:
    """Ids of the style elements that plotly.js would make, which the policy forbids.

    It makes none whose id is there already: pages have empty marks with them, and pages.css the
    few rules that are needed. The style of its maps goes by a hash that changes with its version.
    """
    return ("plotly.js-style-global", *re.findall(r'ById\("([0-9a-f]{64})"\)', plotly_js()))


@cache
def static_asset(name: str) -> tuple[bytes, str] | None:
    """A style sheet or script with its media type; None where there is none of that name."""
    if name == "plotly.min.js":
        content = plotly_js()
    elif name in _REPORT_ASSETS:
        content = asset(name)
    elif name in _OWN_ASSETS:
        content = (files("shardwright.api.pages") / "assets" / name).read_text(encoding="utf-8")
    else:
        return None
    return content.encode(), _TYPES[name.rpartition(".")[2]]
