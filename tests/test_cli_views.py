"""Plans as people read them: every number and sharding shown is the plan's, within the columns."""

import io

import pytest
from rich.console import Console

from shardwright.cli_plan import plan_view
from shardwright.cli_text import source_text
from shardwright.planner.plan_schema import (
    BufferModel,
    CollectiveModel,
    ComputeModel,
    EstimateModel,
    MeshModel,
    OptionsModel,
    PlanModel,
    ProgramModel,
    SolverModel,
    TensorModel,
    VersionsModel,
)
from shardwright.reports.numbers import column, count, quantity, spec_text, type_text
from shardwright.reports.tensors import group_inputs


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.4123, "s", "412.3 ms"),
        (0.04123, "s", "41.2 ms"),
        (1.5e-6, "s", "1.50 µs"),
        (90.0, "s", "90.0 s"),
        (5000.0, "s", "5000.0 s"),
        (0.0, "s", "0 s"),
        (17179869184, "B", "17.2 GB"),
        (12, "B", "12 B"),
        (4.859e17, "FLOP", "485.9 PFLOP"),
    ],
)
def test_quantity_has_about_three_digits_in_a_prefix_that_suits(value, unit, text):
    assert quantity(value, unit) == text


def test_column_has_one_unit_and_aligned_points():
    assert column([0.0774, 0.0012, 0.0], "s") == ("ms", ["77.4", "1.2", "0.0"])
    assert column([], "B") == ("B", [])


def test_one_large_value_does_not_hide_the_usual_ones():
    assert column([58.7e6, 58.7e6, 33.6e6, 2.15e9], "B") == (
        "MB",
        ["58.7", "58.7", "33.6", "2150.0"],
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [(8030261248, "8.03 B"), (124439808, "124.4 M"), (512, "512"), (2.5, "2.5"), (1234.4, "1,234")],
)
def test_count(value, text):
    assert count(value) == text


def test_spec_is_the_python_that_makes_it():
    from jax.sharding import PartitionSpec as P

    for spec in ([], [[], []], [["x"]], [[], ["x"]], [["x", "y"], [], ["z"], []]):
        made = eval(spec_text(spec), {"P": P})
        entries = [None if not e else e[0] if len(e) == 1 else tuple(e) for e in spec]
        assert tuple(made) == tuple(entries[: len(made)])
        assert not any(entries[len(made) :])


def test_type_is_written_as_xla_does():
    assert type_text("bf16", [8, 128]) == "bf16[8,128]"
    assert type_text("f32", []) == "f32[]"


def test_source_below_the_current_directory_is_relative(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert source_text(f"{tmp_path}/src/model.py:14").plain == "src/model.py:14"


def test_long_source_loses_its_first_directories_but_links_to_the_file():
    path = "/usr/lib/python3/site-packages/flax/linen/linear.py"
    text = source_text(f"{path}:287", most=24)
    assert text.plain == "…/linen/linear.py:287"
    assert text.style.link == f"file://{path}"


def tensor(path, shape, spec, dtype="f32"):
    return TensorModel(path=path, shape=shape, dtype=dtype, spec=spec)


def program(*inputs, updated=()):
    return ProgramModel(
        name="step",
        tokens_per_step=1_000_000,
        fingerprint="0",
        inputs=list(inputs),
        outputs=[],
        aliases=[(i, i) for i in updated],
        donate_argnums=[0],
        in_tree=None,
        out_tree=None,
    )


def test_moments_stand_on_the_line_of_their_parameter():
    (group,) = group_inputs(
        program(
            tensor("[0]['opt_state'][0].mu['layers']['w']", [8, 4], [["x"], []]),
            tensor("[0]['opt_state'][0].nu['layers']['w']", [8, 4], [["x"], []]),
            tensor("[0]['params']['layers']['w']", [8, 4], [["x"], []]),
        )
    )
    assert (group.path, group.also, group.count) == (
        "[0]['params']['layers']['w']",
        ("mu", "nu"),
        3,
    )


def test_a_moment_of_another_sharding_has_a_line_of_its_own():
    groups = group_inputs(
        program(
            tensor("[0].mu['w']", [8, 4], [["x"], []]),
            tensor("[0].params['w']", [8, 4], [[], ["x"]]),
        )
    )
    assert sorted(group.path for group in groups) == ["[0].mu['w']", "[0].params['w']"]


def test_layers_that_are_sharded_alike_are_one_line_with_a_star():
    layers = [
        tensor(f"[0]['{tree}']['layers'][{i}]['w']", [8, 4], [["x"], []])
        for tree in ("mu", "params")
        for i in range(3)
    ]
    (group,) = group_inputs(program(*layers))
    assert group.count == 6
    assert group.path.endswith("['layers'][*]['w']")


def test_lines_of_different_tensors_have_names_of_their_own():
    """Blocks of two stages, whose first blocks have another shape."""
    paths = [(stage, block) for stage in (0, 1) for block in range(4)]
    groups = group_inputs(
        program(
            *(
                tensor(f"[0]['block{stage}_{block}']['w']", [4 + stage, 8 + (not block)], [[], []])
                for stage, block in paths
            )
        )
    )
    assert {group.path for group in groups} == {
        "[0]['block0_0']['w']",
        "[0]['block0_{1..3}']['w']",
        "[0]['block1_0']['w']",
        "[0]['block1_{1..3}']['w']",
    }


def test_names_that_differ_are_not_merged():
    groups = group_inputs(
        program(
            tensor("[0]['params']['w_up']", [8, 4], [["x"], []]),
            tensor("[0]['params']['w_gate']", [8, 4], [["x"], []]),
        )
    )
    assert len(groups) == 2


def test_updated_state_comes_before_larger_inputs():
    groups = group_inputs(
        program(tensor("[1]", [1000], [[]]), tensor("[0]['w']", [8], [[]]), updated=[1])
    )
    assert [group.path for group in groups] == ["[0]['w']", "[1]"]


def collective(kind, axes, nbytes, seconds, times, op="stablehlo.dot_general"):
    return CollectiveModel(
        kind=kind,
        axes=axes,
        nbytes=nbytes,
        seconds=seconds,
        count=times,
        op=op,
        source="/home/ada/train/model.py:42",
        shape=[1],
        dtype="f32",
        can_hide=kind == "all_gather",
    )


def a_plan(**changes):
    given = {
        "program": program(
            tensor("[0]['mu']['w']", [4096, 1024], [["data"], ["model"]]),
            tensor("[0]['params']['w']", [4096, 1024], [["data"], ["model"]]),
            tensor("[1]['tokens']", [512, 128], [["data", "model"], []], "i32"),
            updated=[0, 1],
        ),
        "topology": "v5e:16x16",
        "chip": {},
        "mesh": {},
        "mesh_axes": {"data": 32, "model": 8},
        "constraints": [],
        "estimate": EstimateModel(
            step_time_s=0.4123,
            compute_time_s=0.371,
            collective_time_s=0.1295,
            exposed_collective_time_s=0.0413,
            peak_memory_bytes=12.4e9,
            memory_capacity_bytes=16e9,
            mfu=0.451,
            matrix_flops=1e18,
            collectives=[
                collective("all_reduce", ["data"], 33.6e6, 1e-3, 32),
                collective("all_gather", ["data", "model"], 58.7e6, 2e-3, 20),
                collective("all_gather", ["data", "model"], 58.7e6, 2e-3, 12),
            ],
            peak_buffers=[
                BufferModel(name="argument 2", nbytes=2e9),
                BufferModel(name="all_gather near /home/ada/train/model.py:7", nbytes=1e9),
            ],
        ),
        "solver": SolverModel(
            status="feasible", objective=1.0, bound=0.968, gap=0.032, wall_time_s=34.2
        ),
        "meshes_considered": [
            MeshModel(
                axes={"x": 16, "y": 16},
                layout="x=16 on x, y=16 on y",
                status="planned",
                step_time_s=0.5,
                peak_memory_bytes=13e9,
            ),
            MeshModel(
                axes={"data": 32, "model": 8},
                layout="data=32 on x, y (outer 2 of 16), model=8 on y (inner 8 of 16)",
                status="planned",
                step_time_s=0.4123,
                peak_memory_bytes=12.4e9,
            ),
            MeshModel(
                axes={"xy": 256},
                layout="xy=256 on x, y",
                status="does not fit",
                step_time_s=None,
                peak_memory_bytes=20e9,
            ),
        ],
        "replicated_ops": ["stablehlo.custom_call at model.py:9"],
        "assumptions": ["the loop at model.py:3 has an unknown number of passes"],
        "compiler_options": {"xla_option": "1000"},
        "options": OptionsModel(
            topology="v5e:16x16",
            mesh=None,
            pinned={"[1]['tokens']": [["data", "model"], []]},
            memory_fraction=0.9,
            time_limit_s=60.0,
            seed=0,
        ),
        "versions": VersionsModel(shardwright="0", jax="0", jaxlib="0", platform="tpu"),
    }
    return PlanModel(**(given | changes))


def shown(plan, width=100, **options):
    stream = io.StringIO()
    console = Console(file=stream, width=width, markup=False, emoji=False, highlight=False)
    console.print(plan_view(plan, width=width, **options))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def line_with(text, *parts):
    (found,) = [line for line in text.splitlines() if all(part in line for part in parts)]
    return found


def test_head_tells_mesh_time_mfu_tokens_memory_and_gap():
    text = shown(a_plan(), name="llama3-8b")
    assert text.startswith("llama3-8b on v5e:16x16, 256 devices")
    assert "data=32 on x, y (outer 2 of 16), model=8 on y (inner 8 of 16)" in line_with(
        text, "  mesh  ", "data"
    )
    assert "412.3 ms" in line_with(text, "step time")
    line = line_with(text, "exposed communication")
    # Hidden is what is not exposed: 129.5 - 41.3.
    assert "compute 371.0 ms" in line and "41.3 ms" in line and "hidden 88.2 ms" in line
    # 1e6 tokens / 0.4123 s.
    assert "45.1 %" in line_with(text, "MFU") and "2.43 M tokens/s" in line_with(text, "MFU")
    assert "78 % of 16.0 GB, 90 % allowed" in line_with(text, "memory", "12.4 GB")
    assert "3.2 % less" in line_with(text, "solver")


def test_rates_are_told_in_what_a_step_works_on():
    plan = a_plan()
    images = plan.program.model_copy(update={"unit": "images", "tokens_per_step": 1000})
    # 1000 / 0.4123 s.
    assert "2,425 images/s" in shown(plan.model_copy(update={"program": images}))


def test_compute_is_told_by_source_line_longest_first():
    lines = [
        ComputeModel(source=f"model.py:{k}", op="stablehlo.dot_general", seconds=s)
        for k, s in enumerate((0.2, 0.1, 0.05, 0.01, 0.006, 0.005))
    ]
    plan = a_plan()
    estimate = plan.estimate.model_copy(update={"compute": lines})
    text = shown(plan.model_copy(update={"estimate": estimate}))
    # 200 of 371 ms.
    assert line_with(text, "model.py:0").split()[:4] == ["200.0", "54", "%", "dot_general"]
    assert "model.py:4" in text and "model.py:5" not in text
    assert "5 of 6" in line_with(text, "Compute", "371.0 ms")


def test_bars_are_as_long_as_their_parts():
    text = shown(a_plan())
    # 371 of 412.3 ms of 40 cells is 36; 12.4 of 16 GB is 31.
    assert line_with(text, "step time").count("█") == 36
    assert line_with(text, "step time").count("▒") == 4
    assert line_with(text, "memory", "GB").count("█") == 31


def test_shardings_are_the_plans():
    text = shown(a_plan())
    state = line_with(text, "['params']['w'] + mu")
    assert "f32[4096,1024]" in state and "P('data', 'model')" in state
    # Two of 4096 x 1024 x 4 bytes over 256 devices are 131,072 bytes.
    assert state.endswith("131.1")
    tokens = line_with(text, "['tokens']")
    assert "P(('data', 'model'))" in tokens and "pinned" in tokens


def test_collectives_that_are_alike_are_added_and_the_costliest_comes_first():
    text = shown(a_plan())
    lines = [line for line in text.splitlines() if "model.py:42" in line]
    assert ["all-gather" in lines[0], "all-reduce" in lines[1], len(lines)] == [True, True, 2]
    # 32 runs of 2 ms; 32 of 1 ms.
    assert "64.0" in lines[0] and " 32 " in lines[0] and "data, model" in lines[0]
    assert "32.0" in lines[1] and "33.6" in lines[1] and "dot_general" in lines[1]


def test_meshes_come_best_first_with_their_distance_from_the_chosen():
    text = shown(a_plan())
    meshes = text[text.index("Meshes considered") :].splitlines()
    assert "2 planned in 34.2 s, 1 does not fit" in meshes[0]
    assert meshes[3].endswith("chosen") and "data=32" in meshes[3]
    # 500 / 412.3 is 1.2127.
    assert meshes[4].endswith("+21.3 %") and "x=16" in meshes[4]
    assert "xy=256" not in text
    assert line_with(shown(a_plan(), everything=True), "xy=256").endswith("does not fit")


def test_warnings_and_compiler_options_are_told():
    text = shown(a_plan())
    for note in ("custom_call at model.py:9", "unknown number of passes", "xla_option=1000"):
        assert note in text


@pytest.mark.parametrize("width", [80, 100, 140])
def test_nothing_is_wider_than_the_terminal_and_no_sharding_is_cut(width):
    path = "[0]['params']['decoder']['layers']['attention_norm']"
    plan = a_plan(
        program=program(
            *(
                tensor(path.replace("params", tree), [32, 4096, 14336], SPEC)
                for tree in ("params", "m")
            )
        ),
        mesh_axes={"x_outer_y_inner": 32, "x_inner_y_outer": 8},
    )
    for everything in (False, True):
        text = shown(plan, width, everything=everything)
        assert max(map(len, text.splitlines())) <= width
        for piece in ("P(None,", "'x_outer_y_inner'", "'x_inner_y_outer'"):
            assert piece in text


SPEC = [[], ["x_outer_y_inner", "x_inner_y_outer"], []]


def test_every_tensor_is_told_where_asked():
    assert "+ mu" not in shown(a_plan(), everything=True)
    assert line_with(shown(a_plan(), everything=True), "[0]['mu']['w']")


def test_what_fills_the_memory_is_told_by_path_and_source():
    text = shown(a_plan(), everything=True)
    fullest = text[text.index("Memory at its fullest") : text.index("Meshes considered")]
    assert line_with(fullest, "[1]['tokens']").endswith("2.00")
    assert line_with(fullest, "all-gather near", "/home/ada/train/model.py:7").endswith("1.00")


def test_program_that_takes_no_time_is_shown():
    estimate = a_plan().estimate.model_copy(update={"step_time_s": 0.0, "compute_time_s": 0.0})
    assert "0 s" in line_with(shown(a_plan(estimate=estimate)), "step time")
