"""Hypothetical chips and tori: what a workload takes on them, against hand arithmetic."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.cli import main
from shardwright.errors import InputError
from shardwright.hardware_profiles import load_chip, parse_slice
from shardwright.planner import explore_points
from shardwright.planner.explore import Exploration, PointProgress
from shardwright.planner.explore_model import ExplorationModel, PointModel, pareto_front
from shardwright.planner.explore_space import hypothesis, parse_vary, points_of
from shardwright.reports.explore_charts import objective_figures, sensitivity_figure

SIZE = 32768
SQUARE = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.bfloat16)
GATHERED = 64 * 2**20
STEP_OF_MORE = 100 * (1 / 1.01 - 1)
"""Percent by which 1 % more speed changes what nothing else holds up."""


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    return a @ b


def summed(x: jax.Array) -> jax.Array:
    """One all-reduce of 64 Mi floats over every device."""
    total = jax.shard_map(lambda part: jax.lax.psum(part, "d"), in_specs=P("d"), out_specs=P())
    return total(x)


@pytest.fixture(scope="module")
def summed_program() -> sw.Program:
    mesh = jax.sharding.AbstractMesh((4,), ("d",))
    with jax.sharding.use_abstract_mesh(mesh):
        return sw.Program.trace(summed, jax.ShapeDtypeStruct((4, GATHERED), jnp.float32))


def explored(fn: Any, *args: Any, **options: Any) -> Exploration:
    return sw.explore(fn, *args, **{"workers": 1, "time_limit_s": 0.5, **options})


@pytest.fixture(scope="module")
def products() -> Exploration:
    return explored(
        product, SQUARE, SQUARE, base="v5p:2x2x1", vary={"flops": (0.5, 1), "memory": (1, 0.004)}
    )


def test_what_the_matrix_units_bound_takes_as_much_longer_as_they_are_slower(
    products: Exploration,
) -> None:
    slow, usual = (p for p in products.points if p.values["memory"] == 1)
    # 2 * 32768^3 FLOPs over 4 chips of 459e12 FLOP/s, of which large products reach nine tenths;
    # some of the time of the bytes does not overlap.
    least = 2 * SIZE**3 / 4 / 459e12
    assert least < (usual.step_time_s or 0.0) < least / 0.85
    assert slow.step_time_s == pytest.approx(2 * (usual.step_time_s or 0.0), rel=0.05)
    name, gain = usual.binding[0]
    assert (name, gain) == ("flops", pytest.approx(-STEP_OF_MORE, rel=0.05))


def test_a_point_that_does_not_fit_says_so_and_the_others_go_on(products: Exploration) -> None:
    statuses = {(p.values["flops"], p.values["memory"]): p.status for p in products.points}
    assert {status for (_, memory), status in statuses.items() if memory == 1} == {"planned"}
    # A device holds at least a fourth of three matrices of 2.1 GB; 0.1 % of its memory is 103 MB.
    tiny = explored(product, SQUARE, SQUARE, base="v5p:2x2x1", vary={"memory": (0.001, 1)})
    assert [p.status for p in tiny.points] == ["does-not-fit", "planned"]
    assert "more than the" in tiny.points[0].message


def test_what_an_all_reduce_bounds_takes_as_much_longer_as_links_are_slower(
    summed_program: sw.Program,
) -> None:
    made = explored(
        summed_program, base="v5e:2x2", vary={"ici_bandwidth": (0.5, 1), "torus": ("4",)}
    )
    slow, usual = made.points
    # A line of four: each device takes in three fourths of the array twice, over one link.
    link = load_chip("v5e").ici_link_bandwidth.value
    seconds = 2 * (3 / 4) * 4 * GATHERED / link
    assert usual.exposed_collective_time_s == pytest.approx(seconds, rel=0.01)
    assert slow.exposed_collective_time_s == pytest.approx(2 * seconds, rel=0.01)
    name, gain = usual.binding[0]
    assert name == "ici_bandwidth"
    part = (usual.exposed_collective_time_s or 0.0) / (usual.step_time_s or 1.0)
    assert gain == pytest.approx(-STEP_OF_MORE * part, rel=0.01)


def test_a_torus_of_fewer_dimensions_has_fewer_links() -> None:
    base = parse_slice("v5p:4x4x4")
    flat = hypothesis(base, {"torus": "2d", "ici_bandwidth": 3.0})
    assert flat.slice.shape == (8, 8)
    # Four links instead of six, each three times as fast.
    assert flat.resources["ici_bandwidth"] == pytest.approx(2.0)
    assert flat.slice.chip.ici_links_per_chip.value == 4
    link = base.chip.ici_link_bandwidth.value
    assert flat.slice.chip.ici_link_bandwidth.value == 3 * link
    assert flat.slice.wraps == (True, True)


def test_latency_turned_up_is_faster() -> None:
    base = parse_slice("v5p:2x2x2")
    quick = hypothesis(base, {"latency": 2.0}).slice.chip
    assert quick.hop_latency_s.value == base.chip.hop_latency_s.value / 2
    assert quick.hbm_bandwidth.value == base.chip.hbm_bandwidth.value


def test_all_resources_together_speed_the_step_up_as_they_grow() -> None:
    """A step takes 1 / 1.01 of its time where everything is 1 % faster, whatever binds."""

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - 0.1 * jax.grad(lambda w: jnp.square(jax.nn.gelu(x @ w)).sum())(w)

    shapes = (jax.ShapeDtypeStruct((1024, 2048), jnp.float32),)
    shapes += (jax.ShapeDtypeStruct((65536, 1024), jnp.float32),)
    made = explored(step, *shapes, base="v5e:2x4", vary={"flops": (1,)}, donate_argnums=0)
    (point,) = made.points
    assert sum(point.sensitivity.values()) == pytest.approx(STEP_OF_MORE, rel=0.02)
    assert len(point.binding) > 1


def a_point(step: float, ici: float, hbm: float) -> PointModel:
    return PointModel(
        values={"ici_bandwidth": ici, "hbm_bandwidth": hbm},
        torus="8x8",
        wraps=[True, True],
        chips=64,
        resources={"ici_bandwidth": ici, "hbm_bandwidth": hbm},
        status="planned",
        step_time_s=step,
        compute_time_s=step,
        sensitivity={"ici_bandwidth": -0.25, "hbm_bandwidth": -0.5},
    )


POINTS = [
    a_point(4.0, 0.5, 0.5),
    a_point(2.0, 1.0, 0.5),
    a_point(2.0, 1.0, 1.0),  # as fast as the one before, with more
    a_point(1.0, 2.0, 2.0),
    a_point(1.5, 2.0, 1.0),
    a_point(1.0, 2.0, 2.0),  # the same again
]


def test_front_has_the_points_that_none_beats() -> None:
    front = pareto_front(POINTS, ("step_time", "ici_bandwidth", "hbm_bandwidth"))
    assert front == [3, 4, 1, 0]
    assert pareto_front(POINTS, ("step_time", "hbm_bandwidth")) == [3, 4, 1]
    assert pareto_front(POINTS, ("step_time",)) == [3]


def test_figures_have_every_point_and_the_front_in_their_plane() -> None:
    minimise = ["step_time", "ici_bandwidth", "hbm_bandwidth"]
    data = ExplorationModel(
        name="a step", base="v5e:8x8", unit="tokens", tokens_per_step=None, memory_fraction=0.9,
        vary={"ici_bandwidth": [0.5, 1, 2], "hbm_bandwidth": [0.5, 1, 2]},
        minimise=minimise, points=POINTS, front=pareto_front(POINTS, minimise),
    )  # fmt: skip
    (_, ici), (_, hbm) = objective_figures(data)
    dots, ringed, line = ici["data"]
    assert list(zip(dots["x"], dots["y"], strict=True)) == [
        (p.resources["ici_bandwidth"], p.step_time_s) for p in POINTS
    ]
    assert sorted(ringed["y"]) == [1.0, 1.5, 2.0, 4.0]
    assert (line["x"], line["y"]) == ([0.5, 1.0, 2.0], [4.0, 2.0, 1.0])
    assert hbm["data"][-1]["x"] == [0.5, 1.0, 2.0]
    bars = sensitivity_figure(data)
    assert bars is not None
    assert {bar["name"]: bar["x"][0] for bar in bars["data"]} == {
        "ici_bandwidth": 0.25,
        "hbm_bandwidth": 0.5,
    }


def test_a_journal_is_gone_on_with_and_plans_nothing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {
        "base": "v5p:2x2x1", "vary": {"flops": (1, 2)}, "journal": tmp_path / "points.jsonl",
    }  # fmt: skip

    def stop(progress: PointProgress) -> None:
        if progress.point is not None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        explored(product, SQUARE, SQUARE, on_progress=stop, **asked)
    with (tmp_path / "points.jsonl").open("a") as file:
        file.write('{"point": {"val')  # as a kill in the middle of a line leaves it
    told: list[PointProgress] = []
    whole = explored(product, SQUARE, SQUARE, on_progress=told.append, **asked)
    assert [p.values for p in told if p.point is not None] == [{"flops": 1}, {"flops": 2}]
    started = [p.values for p in told if p.point is None and p.planning is None]
    assert started == [{"flops": 2}]

    def fail(*_: Any) -> None:
        raise AssertionError("planned again")

    monkeypatch.setattr("shardwright.planner.explore.run", fail)
    assert explored(product, SQUARE, SQUARE, **asked).to_json() == whole.to_json()
    with pytest.raises(InputError, match="is of another exploration"):
        explored(lambda a: a + 1, SQUARE, **asked)


def test_a_plan_found_for_one_point_is_priced_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if the search at the first point had found a plan that keeps everything whole."""
    whole = explored(product, SQUARE, SQUARE, base="v5p:2x2x1", vary={"flops": (1,)}).points[0]
    seed = whole.seed
    assert seed is not None
    slow = seed.model_copy(update={"choices": [0] * len(seed.choices)})

    def found(task: explore_points.PointTask, report: Callable[..., None]) -> PointModel:
        if task.search and task.values["flops"] == 1:
            task = dataclasses.replace(task, known=(slow,), search=False)
        return explore_points.run(task, report)

    explore_points._BENCHES.clear()
    monkeypatch.setattr("shardwright.planner.explore.run", found)
    made = explored(product, SQUARE, SQUARE, base="v5p:2x2x1", vary={"flops": (1, 1.5)})
    assert made.points[0].step_time_s == pytest.approx(whole.step_time_s)
    assert made.points[0].compared == 2


def test_a_plan_of_a_journal_is_where_the_next_point_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {"base": "v5p:2x2x1", "journal": tmp_path / "points.jsonl"}
    explored(product, SQUARE, SQUARE, vary={"flops": (1,)}, **asked)
    explore_points._BENCHES.clear()
    monkeypatch.setattr(explore_points, "search_meshes", lambda *_, **__: pytest.fail("searched"))
    made = explored(product, SQUARE, SQUARE, vary={"flops": (1, 4)}, **asked)
    assert [point.status for point in made.points] == ["planned", "planned"]


def test_workers_find_what_this_process_finds(products: Exploration) -> None:
    there = explored(product, SQUARE, SQUARE, base="v5p:2x2x1", vary={"flops": (0.5, 1)}, workers=2)
    here = [p.step_time_s for p in products.points if p.values["memory"] == 1]
    assert [p.step_time_s for p in there.points] == pytest.approx(here)


TEXTS = {
    "ici_bandwidth=0.5..2": ("ici_bandwidth", (0.5, 0.7071, 1.0, 1.414, 2.0)),
    "flops=1..4:3": ("flops", (1.0, 2.0, 4.0)),
    "memory=0.5,1": ("memory", (0.5, 1.0)),
    "torus=2d,4x4x4": ("torus", ("2d", "4x4x4")),
}


@pytest.mark.parametrize("text", TEXTS)
def test_knobs_in_text(text: str) -> None:
    assert parse_vary(text) == TEXTS[text]


def test_points_are_every_combination() -> None:
    assert len(points_of({"flops": (1, 2), "torus": ("2d", "3d"), "memory": (1, 2, 4)})) == 12


BAD: dict[str, tuple[list[str], str]] = {
    "unknown knob": (["--vary=speed=1,2"], "names no knob"),
    "no values": (["--vary=flops"], "is not KNOB=VALUES"),
    "no number": (["--vary=flops=fast"], "which is no number"),
    "nothing in it": (["--vary=flops=2..1"], "holds nothing"),
    "no multiple": (["--vary=flops=0,1"], "no multiple above zero"),
    "no torus": (["--vary=torus=4d"], "neither 1d, 2d, 3d nor a shape"),
    "too many": (["--vary=flops=1..2:40", "--vary=memory=1..2:40"], "1600 points"),
    "no objective": (["--vary=flops=1,2", "--minimise=torus"], "cannot be minimised"),
    "no page": (["--vary=flops=1,2", "-o", "points.txt"], "no form of exploration"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_told_before_any_work(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, message = BAD[name]
    assert main(["explore", "mlp", "--base=v5e:2x2", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_the_command_shows_the_front_and_writes_page_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, data = tmp_path / "points.html", tmp_path / "points.json"
    small = ["--set=hidden=512", "--set=features=256", "--batch=1024", "--time-limit=0.5", "-q"]
    code = main(
        [
            *("explore", "mlp", "--base=v5e:2x2", "--vary=hbm_bandwidth=1,2", "--workers=1"),
            *(*small, "-o", str(page), "-o", str(data)),
        ]
    )
    out = capsys.readouterr().out
    assert code == 0
    assert "mlp around v5e:2x2, 1,024 examples a step" in out and "Pareto front" in out
    made = ExplorationModel.model_validate_json(data.read_text())
    assert [point.values for point in made.points] == [{"hbm_bandwidth": 1}, {"hbm_bandwidth": 2}]
    assert "Step time against HBM bandwidth" in page.read_text()
