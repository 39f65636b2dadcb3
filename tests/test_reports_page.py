"""A plan's page: what it says is what the plan says, and nothing in a plan can run."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import shardwright as sw
from shardwright.cli import main
from shardwright.planner.plan_schema import PlanModel
from shardwright.reports.figures import memory_figure
from shardwright.reports.numbers import quantity, spec_text
from shardwright.reports.page import plan_page
from shardwright.reports.pictures import charts, torus_pictures
from shardwright.reports.tree import tensor_tree

WIDTH, BATCH = 1024, 2048
INJECTION = "<script>alert('x')</script>"


def train_step(state: dict[str, jax.Array], x: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    def loss(weights: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(x @ weights) ** 2)

    value, gradient = jax.value_and_grad(loss)(state["w"])
    return {"w": state["w"] - 0.1 * gradient, "b": state["b"]}, value


@pytest.fixture(scope="module")
def plan() -> sw.Plan:
    state = {
        "w": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32),
        "b": jax.ShapeDtypeStruct((WIDTH,), jnp.float32),
    }
    return sw.plan(
        train_step,
        state,
        jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32),
        topology="v5e:2x4",
        donate_argnums=(0,),
        mesh={"data": 4, "model": 2},
        pinned={"[1]": PartitionSpec("data", None)},
        name="small",
        tokens_per_step=BATCH,
    )


class Page(HTMLParser):
    """Tables by caption, ids, and scripts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.words: list[str] = []
        self.addresses: list[str] = []
        self._caption: str | None = None
        self._rows: list[list[str]] = []
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open.append(tag)
        given = dict(attrs)
        self.addresses += [v for k in ("src", "href") if (v := given.get(k))]
        if tag == "table":
            self._rows, self._caption = [], ""
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._rows[-1].append("")
        elif tag == "script":
            self.scripts.append((given, ""))

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass
        if tag == "table":
            self.tables[" ".join((self._caption or "").split())] = self._rows

    def handle_data(self, data: str) -> None:
        if "script" in self._open:
            attrs, text = self.scripts[-1]
            self.scripts[-1] = (attrs, text + data)
            return
        if "style" in self._open:
            return
        if "caption" in self._open:
            self._caption = (self._caption or "") + data
        elif {"td", "th"} & set(self._open):
            self._rows[-1][-1] += data
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def page(plan: sw.Plan) -> Page:
    return Page(plan_page(plan.data))


def table(page: Page, caption: str) -> list[dict[str, str]]:
    rows = next(rows for name, rows in page.tables.items() if name.startswith(caption))
    cells = [[" ".join(cell.split()) for cell in row] for row in rows]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[1:]]


def test_headline_facts_are_those_of_the_plan(plan: sw.Plan, page: Page) -> None:
    estimate = plan.estimate
    assert f"Step time {quantity(estimate.step_time_s, 's')}" in page.text
    assert f"MFU {100 * estimate.mfu:.1f} %" in page.text
    assert f"Peak memory a device {quantity(estimate.peak_memory_bytes, 'B')}" in page.text
    assert f"Solver {plan.solver.status}" in page.text
    rate = BATCH / estimate.step_time_s / 1e6
    assert f"Tokens/s {rate:.1f} M" in page.text or f"Tokens/s {rate:.2f} M" in page.text


def test_the_step_time_is_split_into_what_the_plan_says(plan: sw.Plan, page: Page) -> None:
    estimate = plan.estimate
    assert f"compute {quantity(estimate.compute_time_s, 's')}" in page.text
    exposed = quantity(estimate.exposed_collective_time_s, "s")
    assert f"exposed communication {exposed}" in page.text


def test_collectives_add_up_to_the_plan_s(plan: sw.Plan, page: Page) -> None:
    rows = table(page, "Collectives of one step")
    assert sum(float(row["times"]) for row in rows) == sum(
        c.count for c in plan.estimate.collectives
    )
    (heading,) = [name for name in rows[0] if name.endswith("in all")]
    scale = {"s": 1, "ms": 1e-3, "µs": 1e-6}[heading.split()[0]]
    total = sum(float(row[heading]) for row in rows) * scale
    assert total == pytest.approx(plan.estimate.collective_time_s, rel=0.05)


def test_every_tensor_has_its_spec_local_shape_and_bytes(plan: sw.Plan, page: Page) -> None:
    leaves = {
        row["tensor"]: row
        for name in page.tables
        for row in table(page, name)
        if "PartitionSpec" in row
    }
    weights = next(t for t in plan.data.program.inputs if t.path == "[0]['w']")
    parts = [
        WIDTH // (4 if "data" in axes else 1) // (2 if "model" in axes else 1)
        for axes in weights.spec
    ]
    assert leaves["['w']"]["PartitionSpec"] == spec_text(weights.spec)
    assert leaves["['w']"]["local shape"] == f"[{parts[0]},{parts[1]}]"
    assert leaves["['w']"]["a device"] == quantity(parts[0] * parts[1] * 4, "B")
    assert "[1] pinned" in leaves


def test_alternatives_are_all_the_meshes_considered(plan: sw.Plan, page: Page) -> None:
    rows = table(page, "Meshes with step time")
    assert {row["mesh"] for row in rows} == {mesh.layout for mesh in plan.data.meshes_considered}
    assert sum("chosen" in row.values() for row in rows) == 1


def test_what_fills_the_peak_adds_up_to_it(plan: sw.Plan, page: Page) -> None:
    rows = table(page, "What fills memory at its fullest")
    (unit,) = {"B", "kB", "MB", "GB"} & set(rows[0])
    scale = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}[unit]
    total = sum(float(row[unit]) for row in rows) * scale
    assert total == pytest.approx(plan.estimate.peak_memory_bytes, rel=0.01)


def test_the_memory_chart_ends_at_the_peak(plan: sw.Plan) -> None:
    figure = memory_figure(plan.estimate, 0.9)
    assert figure is not None
    total = next(trace for trace in figure["data"] if trace["name"] == "total")
    assert max(total["y"]) * 1e9 == pytest.approx(plan.estimate.peak_memory_bytes)
    stacked = [trace["y"] for trace in figure["data"] if "stackgroup" in trace]
    assert [sum(row) for row in zip(*stacked, strict=True)] == pytest.approx(total["y"])


def test_charts_are_figures_that_plotly_accepts(plan: sw.Plan) -> None:
    graph_objects = pytest.importorskip("plotly.graph_objects")
    for figure in charts(plan.data).values():
        graph_objects.Figure(figure)


def test_a_tree_joins_parts_with_one_branch_and_keeps_every_tensor(plan: sw.Plan) -> None:
    tensors = plan.data.program.inputs
    named = [
        tensors[0].model_copy(update={"path": path})
        for path in ("[0]['params']['a']['w']", "[0]['params']['a']['b']", "[1]['x']")
    ]
    tree = tensor_tree(named, plan.mesh_axes)
    assert [branch.key for branch in tree.branches] == ["[0]['params']['a']", "[1]"]
    assert [leaf.key for leaf in tree.branches[0].leaves] == ["['w']", "['b']"]
    assert tree.count == 3
    assert tree.local_bytes == sum(leaf.local_bytes for b in tree.branches for leaf in b.leaves)


def with_injections(plan: PlanModel) -> PlanModel:
    raw = json.loads(plan.model_dump_json())

    raw["program"]["name"] = f"model {INJECTION}"
    for tensor in raw["program"]["inputs"] + raw["program"]["outputs"]:
        tensor["path"] = f"[0]['{INJECTION}']{tensor['path']}"
    for collective in raw["estimate"]["collectives"]:
        collective["source"] = f"/{INJECTION}.py:1"
    for buffer in raw["estimate"]["peak_buffers"]:
        buffer["name"] = f"{INJECTION} at /{INJECTION}.py:1"
    raw["estimate"]["memory"]["sources"] = [
        f"/{INJECTION}.py:{n}" for n, _ in enumerate(raw["estimate"]["memory"]["sources"])
    ]
    for line in raw["estimate"]["compute"]:
        line["source"] = f"/{INJECTION}.py:2"
    for constraint in raw["constraints"]:
        constraint["source"] = f"/{INJECTION}.py:3"
    raw["replicated_ops"] = [INJECTION]
    raw["assumptions"] = ["</script><img src=x onerror=alert(1)>"]
    return PlanModel.model_validate(raw)


def test_nothing_that_names_hold_becomes_markup(plan: sw.Plan) -> None:
    poisoned, clean = Page(plan_page(with_injections(plan.data))), Page(plan_page(plan.data))
    assert len(poisoned.scripts) == len(clean.scripts)
    assert f"model {INJECTION}" in poisoned.text
    assert "script>.py:1" in poisoned.text
    assert "<img src=x onerror=alert(1)>" in poisoned.text


def test_the_page_allows_its_own_scripts_alone(plan: sw.Plan) -> None:
    text = plan_page(with_injections(plan.data))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy
    rules = policy[1].replace("&#39;", "'")
    assert "default-src 'none'" in rules
    assert "script-src 'sha256-" in rules
    for attrs, script in Page(text).scripts:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        if attrs.get("type") == "application/json":
            json.loads(script)
        else:
            assert f"'sha256-{digest}'" in rules


def test_the_page_needs_no_other_file(page: Page) -> None:
    assert all(address.startswith(("#", "data:")) for address in page.addresses)


def test_plans_of_older_versions_have_pages(plan: sw.Plan) -> None:
    estimate = plan.estimate.model_copy(update={"memory": None, "compute": []})
    old = plan.data.model_copy(update={"estimate": estimate})
    text = plan_page(old)
    assert "Memory over the step" in text
    assert 'data-figure="' not in text


def test_torus_pictures_are_one_for_each_axis(plan: sw.Plan) -> None:
    assert set(torus_pictures(plan.data)) == {"torus-data", "torus-model"}


def test_reports_import_neither_jax_nor_the_service() -> None:
    code = (
        "import sys, shardwright.reports.page, shardwright.reports.pictures, "
        "shardwright.reports.comparison_page; "
        "print([m for m in sys.modules if m == 'jax' or m.startswith('shardwright.api')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_command_writes_the_page_beside_the_plan(plan: sw.Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    assert main(["report", str(tmp_path / "plan.json")]) == 0
    assert (tmp_path / "plan.html").read_text(encoding="utf-8") == plan_page(plan.data)


def test_the_command_refuses_what_is_no_page_and_no_plan(
    plan: sw.Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    assert main(["report", str(path), "-o", str(tmp_path / "plan.png")]) == 2
    assert "--png DIR" in capsys.readouterr().err
    path.write_text("{}")
    assert main(["report", str(path)]) == 2
    assert "not a Shardwright plan" in capsys.readouterr().err
    assert not (tmp_path / "plan.html").exists()
