"""A plan's page as one self-contained HTML text: it needs no network and no other file."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files

from markupsafe import Markup

from shardwright.planner.plan_schema import PlanModel
from shardwright.reports.sections import (
    device_count,
    environment,
    plan_headline,
    plan_sections,
    plan_title,
)
from shardwright.version import VERSION


def asset(name: str) -> str:
    """The text of a style sheet or script of the reports."""
    return (files("shardwright.reports") / "assets" / name).read_text(encoding="utf-8")


def plotly_js() -> str:
    """The text of plotly.js as the plotly package brings it."""
    return (files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")


def plan_page(plan: PlanModel) -> str:
    """Everything about a plan, for engineers who are about to run it.

    Scripts are inside and allowed by their hashes alone, so nothing that a path, a name or a source
    line holds can run.

    Raises:
      InputError: the plan is damaged.
    """
    title, devices = plan_title(plan), device_count(plan)
    noun = "device" if devices == 1 else "devices"
    lead = f"{devices} {noun}. What one train step costs on each, and why."
    head = Markup('<h1>{}</h1>\n<p class="lead">{}</p>\n').format(title, lead)
    content = head + plan_headline(plan) + plan_sections(plan)
    return document(title, content, charts='data-figure="' in content)


def document(title: str, content: Markup, charts: bool) -> str:
    """A self-contained HTML document around the content of a page.

    Args:
      title: of the document.
      content: safe markup for its main part.
      charts: whether it has charts, for which plotly.js is put in.
    """
    scripts = [Markup(script) for script in _scripts(charts)]
    return (
        environment()
        .get_template("report.html")
        .render(
            title=title,
            content=content,
            style=Markup(asset("report.css")),
            scripts=scripts,
            policy=_policy(scripts),
            version=VERSION,
        )
    )


def _scripts(charts: bool) -> list[str]:
    return [plotly_js()] * charts + [asset("report.js")]


def _policy(scripts: Sequence[str]) -> str:
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'"
        for s in scripts
    )
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
