"""Published models have their published sizes. Nothing here allocates an array."""

import jax
import jax.numpy as jnp
import pytest
from jaxlib.mlir import ir

from shardwright.models import build, model_names

# Exact counts of the released checkpoints, as Hugging Face lists them from the safetensors headers
# (gpt2; meta-llama/Llama-2-7b-hf, Llama-2-70b-hf without the rotary buffers; Meta-Llama-3-8B,
# Meta-Llama-3-70B, Llama-3.1-405B).
RELEASED_COUNTS = {
    "gpt2-124m": 124_439_808,
    "llama2-7b": 6_738_415_616,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
}

# Brown et al., Language Models are Few-Shot Learners (2020), table D.1: millions of parameters.
GPT3_MILLIONS = {"gpt3-13b": 12_850, "gpt3-175b": 174_600}

# Real runs logged in AI-Hypercomputer/tpu-recipes training/trillium at c8cfe2f: TFLOP/s a device,
# seconds a step, devices. Their FLOPs count the whole attention square, as here.
LOGGED_RUNS = [
    ("gpt3-175b", {"vocab": 50_304, "sequence": 2048, "batch": 768}, 384.891, 17.182, 256),
    ("llama3-70b", {"sequence": 8192, "batch": 1280}, 462.297, 42.656, 256),
    ("llama3-8b", {"sequence": 8192, "batch": 1024}, 417.397, 4.546, 256),
]


@pytest.mark.parametrize("name", RELEASED_COUNTS)
def test_parameters_are_as_many_as_in_the_released_checkpoint(name):
    assert build(name).parameter_count == RELEASED_COUNTS[name]


def test_attention_scores_of_a_llama3_8b_sequence_fit_a_small_chip_by_default():
    # 4 bytes x 32 heads x 2048^2 = 0.54 GB of v5e's 16; the 8192 tokens of the paper take 8.6 GB.
    options = build("llama3-8b").options
    assert 4 * options.heads * options.sequence**2 == 536_870_912
    assert build("llama3-8b", sequence=8192).options.sequence == 8192


@pytest.mark.parametrize("name", GPT3_MILLIONS)
def test_gpt3_has_the_parameters_of_table_d1(name):
    assert build(name).parameter_count / 1e6 == pytest.approx(GPT3_MILLIONS[name], rel=5e-4)


def test_lamda_has_137_billion_parameters():
    """Thoppilan et al., LaMDA (2022), section 4."""
    assert build("lamda-137b").parameter_count / 1e9 == pytest.approx(137, rel=0.01)


@pytest.mark.parametrize(("name", "options", "tflops", "seconds", "devices"), LOGGED_RUNS)
def test_model_flops_agree_with_logged_runs(name, options, tflops, seconds, devices):
    logged = tflops * 1e12 * seconds * devices
    assert build(name, **options).model_flops_per_step == pytest.approx(logged, rel=2e-3)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama3-8b", {"remat": "none"}),
        ("llama3-8b", {"remat": "none", "scan_layers": False, "layers": 3}),
        ("gpt2-124m", {"remat": "none"}),
        ("mlp", {}),
    ],
)
def test_model_flops_are_those_of_the_products_in_the_step(name, options):
    model = build(name, **options)
    jaxpr = jax.make_jaxpr(model.train_step)(*model.example_args)
    assert dot_flops(jaxpr.jaxpr) == model.model_flops_per_step


def test_full_remat_repeats_the_forward_pass_of_every_layer():
    options = {"batch": 4, "sequence": 256}
    kept = build("llama3-8b", remat="none", **options)
    repeated = build("llama3-8b", remat="full", **options)
    extra = step_dot_flops(repeated) - step_dot_flops(kept)
    # One layer's forward pass is 2 FLOPs a weight and token, and 4 s d a token of attention;
    # the last product of a layer (d_ff x d_model) is not needed again.
    weights = 4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 14336 - 4096 * 14336
    assert extra == 4 * 256 * 32 * (2 * weights + 4 * 256 * 4096)


@pytest.mark.parametrize("name", model_names())
def test_every_preset_lowers_for_tpu_without_big_constants(name):
    model = build(name)
    step = jax.jit(model.train_step, donate_argnums=model.donate_argnums)
    module = step.trace(*model.example_args).lower(lowering_platforms=("tpu",)).compiler_ir()
    sizes = []

    def record(op):
        if op.name == "stablehlo.constant":
            value = op.attributes["value"]
            sizes.append(1 if value.is_splat else len(value))
        return ir.WalkResult.ADVANCE

    module.operation.walk(record)
    assert sizes
    assert max(sizes) <= 512


def test_donation_lets_every_part_of_the_state_be_updated_in_place():
    model = build("llama3-8b")
    step = jax.jit(model.train_step, donate_argnums=model.donate_argnums)
    text = step.trace(*model.example_args).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tf.aliasing_output") == len(jax.tree.leaves(model.example_args[0]))


def test_state_keeps_float32_masters_and_the_moments_asked_for():
    state, _ = build("llama2-7b", mu_dtype="bfloat16").example_args
    assert state["params"]["layers"]["wq"].dtype == jnp.float32
    assert state["opt_state"][0].mu["layers"]["wq"].dtype == jnp.bfloat16
    assert state["opt_state"][0].nu["layers"]["wq"].dtype == jnp.float32


def test_paths_in_the_state_read_as_names():
    paths = [
        jax.tree_util.keystr(path)
        for path, _ in jax.tree_util.tree_leaves_with_path(build("llama3-8b").example_args)
    ]
    assert "[0]['params']['layers']['wq']" in paths
    assert "[0]['opt_state'][0].mu['embedding']" in paths
    assert "[1]['tokens']" in paths


def step_dot_flops(model):
    return dot_flops(jax.make_jaxpr(model.train_step)(*model.example_args).jaxpr)


def dot_flops(jaxpr):
    """2 m n k of every dot_general, those in a scan as often as it runs."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            depth = 1
            for dimension in contracted:
                depth *= eqn.invars[0].aval.shape[dimension]
            total += 2 * eqn.outvars[0].aval.size * depth
        repeats = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple) else (value,):
                inner_jaxpr = getattr(inner, "jaxpr", inner)
                if hasattr(inner_jaxpr, "eqns"):
                    total += repeats * dot_flops(inner_jaxpr)
    return total
