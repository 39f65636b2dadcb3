"""What the pages about comparing say: their commands run, their tables are as planned."""

import re
import shlex
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import optax
import pytest

import shardwright as sw
from shardwright.cli import main
from shardwright.cli_inputs import load_program
from shardwright.hardware_profiles import load_chip
from shardwright.planner.comparison_rows import ComparisonModel
from shardwright.planner.prices import load_prices

ROOT = Path(__file__).parent.parent
PRICES = ROOT / "examples" / "comparing" / "prices.toml"
COMPARING = (ROOT / "docs" / "comparing.md").read_text()
USING = (ROOT / "docs" / "using-plans.md").read_text()
DRIFT = 0.15
"""How far step times of the page may be from those of this version."""


def commands(text):
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.S | re.M)
    return [shlex.split(line)[1:] for block in blocks for line in block.splitlines()]


def tables(text):
    """The Markdown tables of a page, each a list of rows of cells."""
    found = re.findall(r"((?:^\|.*\|\n)+)", text, re.M)
    return [
        [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
        for table in (t.rstrip("\n") for t in found)
    ]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("docs")
    (path / "prices.toml").write_text(PRICES.read_text())
    return path


@pytest.fixture
def here(directory, monkeypatch):
    monkeypatch.chdir(directory)
    return directory


def compared(arguments):
    code = main([*arguments, "--time-limit=1", "--quiet", "-o", "table.json"])
    assert code == 0, arguments
    return ComparisonModel.model_validate_json(Path("table.json").read_text())


def told_steps(title):
    """Slice -> seconds of a step, in the table behind a heading."""
    section = COMPARING.partition(f"### {title}")[2].partition("\n### ")[0]
    header, _, *rows = tables(section)[0]
    (place,) = [i for i, name in enumerate(header) if name.startswith("step, ")]
    scale = 1e-3 if header[place] == "step, ms" else 1.0
    return {row[0]: float(row[place]) * scale for row in rows if row[place]}, rows, header


COMPARISONS = [c for c in commands(COMPARING) if c[0] == "compare"]


@pytest.mark.parametrize(
    ("title", "command"),
    [
        ("llama3-8b", COMPARISONS[0]),
        ("gpt2-124m", COMPARISONS[3]),
        ("llama3-70b", COMPARISONS[4]),
    ],
)
def test_the_tables_are_as_planned(title, command, here):
    made = compared(command)
    told, rows, header = told_steps(title)
    planned = {row.topology: row for row in made.rows if row.fits}
    assert told.keys() == planned.keys()
    for topology, seconds in told.items():
        assert planned[topology].step_time_s == pytest.approx(seconds, rel=DRIFT)
    verdicts = {row[0]: row[-1] for row in rows}
    for measure, word in (("time", "by time"), ("cost", "by cost"), ("chips", "by chips")):
        winner = getattr(made.winners, measure)
        named = [topology for topology, verdict in verdicts.items() if word in verdict]
        if named:
            assert named == [winner]
    # Costs follow from step times: chips * price * seconds / 3600, over millions of tokens.
    if "cost of 1 M tokens" in header:
        prices = load_prices(PRICES)
        place = header.index("cost of 1 M tokens")
        for row in rows:
            hourly = prices.per_hour(row[0])
            cost = hourly * told[row[0]] / 3600 / (made.tokens_per_step / 1e6)
            assert float(row[place]) == pytest.approx(cost, rel=0.01)


def test_chips_of_the_page_are_those_of_the_profiles():
    (table,) = [t for t in tables(COMPARING) if t[0][0] == "chip"]
    for name, peak, bandwidth in table[2:]:
        chip = load_chip(name)
        assert float(peak) * 1e12 == pytest.approx(chip.peak_flops["bf16"].value)
        assert float(bandwidth) * 1e9 == pytest.approx(chip.hbm_bandwidth.value)


@pytest.mark.parametrize(
    ("title", "fast", "slow", "fast_chips", "slow_chips"),
    [
        ("llama3-8b", "tpu7x:2x4x4", "v5p:4x4x4", 32, 64),
        ("gpt2-124m", "v5p:2x2x4", "v6e:4x4", 16, 16),
        ("gpt2-124m", "v5p:2x2x4", "v5e:4x4", 16, 16),
        ("llama3-70b", "tpu7x:4x4x8", "v5p:4x8x8", 128, 256),
        ("llama3-70b", "v6e:16x16", "v5p:4x8x8", 256, 256),
    ],
)
def test_steps_differ_between_the_ratios_of_peak_and_bandwidth(
    title, fast, slow, fast_chips, slow_chips
):
    told, _, _ = told_steps(title)
    a, b = (load_chip(name.partition(":")[0]) for name in (fast, slow))
    peaks = fast_chips * a.peak_flops["bf16"].value / (slow_chips * b.peak_flops["bf16"].value)
    bandwidths = fast_chips * a.hbm_bandwidth.value / (slow_chips * b.hbm_bandwidth.value)
    ratio = told[slow] / told[fast]
    assert min(peaks, bandwidths) <= ratio <= max(peaks, bandwidths)


def test_globs_and_goals_of_the_page_run(here, capsys):
    made = compared([*COMPARISONS[1], "--layers=1"])
    assert {row.chips for row in made.rows} == {4, 8, 16}
    capsys.readouterr()
    made = compared(COMPARISONS[2])
    assert made.winners.goal is not None
    assert "finishes in five\ndays" in COMPARING
    assert f"in 5 d is {made.winners.goal}" in capsys.readouterr()[0]


def test_the_sweep_of_the_page_runs(here):
    (command,) = [c for c in commands(COMPARING) if c[0] == "sweep"]
    assert main([*command, "--layers=1", "--time-limit=0.5", "--quiet"]) == 0
    rows = Path("sweep.csv").read_text().splitlines()
    assert len(rows) == 1 + 2 * 2


def test_files_of_the_page_hold_the_step_with_the_names_of_its_state(here):
    """The page's code, on a step with optax's state, which jax.export cannot write."""
    optimizer = optax.adamw(1e-3)

    def step(state, batch):
        params, moments = state
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((batch @ p["w"]) ** 2))(params)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    params = {"w": jax.ShapeDtypeStruct((64, 32), jnp.float32)}
    names = {
        "jax": jax, "sw": sw, "Path": Path, "step": step,
        "state": (params, jax.eval_shape(optimizer.init, params)),
        "batch": jax.ShapeDtypeStruct((16, 64), jnp.float32),
    }  # fmt: skip
    for block in re.findall(r"^```python\n(.*?)^```", USING, re.S | re.M):
        exec(compile(block, "using-plans.md", "exec"), names)
    with pytest.raises(ValueError, match="Cannot serialize PyTreeDef containing an unregistered"):
        jax.export.export(jax.jit(step), platforms=["tpu"])(
            names["state"], names["batch"]
        ).serialize()
    for file, moment in (("step.mlirbc", "[0][1][0].mu['w']"), ("exported.bin", "[1][0].mu['w']")):
        program = load_program(Path(file))
        assert sum(moment in tensor.path for tensor in program.inputs) == 1
        # Weight, two moments and a count are taken over; the loss and the batch are not.
        assert len(program.aliases) == 4 and len(program.inputs) == 5


def made_small(line):
    """The same plan of fewer layers, and of the largest model on fewer chips."""
    if "gpt2-124m" in line:
        return [*line, "--layers=2"]
    if "llama3-8b" in line:
        fewer = "v5e:2x2" if "--layout" in line else "v5e:1x1"
        line = [fewer if word == "v5e:16x16" else word for word in line]
        return [*line, "--layers=1", "--batch=1", "--set=vocab=1024"]
    return line


def test_every_command_about_plans_runs(here, capsys):
    # Those that need the TPU compiler, or a package of the reader's own, cannot run here.
    lines = [line for line in commands(USING) if not {"--refine", "--variants"} & set(line)]
    assert {line[0] for line in lines} == {"plan", "diff", "explain", "export", "trace"}
    for line in lines:
        quick = ["--time-limit=1"] if line[0] in ("plan", "explain") else []
        assert main([*made_small(line), *quick]) == 0, line
    out, _ = capsys.readouterr()
    assert "LOGICAL_AXIS_RULES" in out
    assert "logical_axis_rules:" in out
    (place,) = re.findall(r"explain a.json train.py:33", USING)
    lines = re.findall(r"^# (\S+:\d+)$", out, re.M)
    found = main(["explain", "a.json", f"{lines[0]}#1", "--resolve=0"])
    assert (place, found) == ("explain a.json train.py:33", 0)
