"""Seconds on one device, against hand arithmetic, measurements, and what libtpu schedules."""

import numpy as np
import pytest

from shardwright.cost_models.compute import (
    convolution_seconds,
    gather_seconds,
    hbm_seconds,
    matmul_seconds,
    roofline_seconds,
    sort_seconds,
    vector_ops,
    vector_seconds,
)
from shardwright.hardware_profiles.chip import load_chip

V4, V5E, V5P, V6E, TPU7X = (load_chip(name) for name in ("v4", "v5e", "v5p", "v6e", "tpu7x"))

# `estimated_cycles` of libtpu 0.0.42.1 for bf16 [m, k] x [k, n] that the matrix unit bounds
# (benchmarks/compute_fidelity.py).
SCHEDULED_MATMULS = [
    (V5E, 4096, 4096, 4096, 1_083_068),
    (V5E, 2048, 12288, 49152, 19_299_561),
    (V5E, 2048, 2048, 2048, 143_032),
    (V5E, 192, 4096, 4096, 57_598),
    (V5E, 64, 4096, 4096, 22_873),
    (V5E, 8, 4096, 4096, 13_048),
    (V5P, 4096, 4096, 4096, 544_925),
    (V5P, 192, 4096, 4096, 31_849),
    (V6E, 4096, 4096, 4096, 301_616),
    (V6E, 2048, 12288, 49152, 5_272_645),
    (V6E, 192, 4096, 4096, 21_836),
    (V6E, 64, 4096, 4096, 14_940),
]

# The same for bf16 convolutions: images, pixels a side, window, features in and out.
SCHEDULED_CONVOLUTIONS = [
    (V5E, 32, 64, 3, 512, 512, 4_794_124),
    (V5E, 32, 64, 3, 256, 256, 1_207_494),
    (V5E, 32, 64, 3, 128, 128, 319_666),
    (V5E, 32, 56, 3, 64, 64, 154_112),
    (V5E, 32, 64, 3, 256, 64, 611_876),
    (V5E, 32, 224, 7, 3, 64, 2_750_592),
    (V6E, 32, 64, 3, 256, 256, 325_926),
    (V6E, 32, 64, 3, 512, 512, 1_258_985),
    (V6E, 32, 64, 3, 256, 64, 318_167),
]

# Bundles, one a cycle, that libtpu 0.0.42.1 schedules for one operation on 8 x 128 values
# (benchmarks/compute_fidelity.py).
SCHEDULED_VECTOR_OPS = [
    (V5E, "exponential", "f32", 1.09),
    (V5E, "tanh", "f32", 1.03),
    (V5E, "log", "f32", 1.09),
    (V5E, "log_plus_one", "f32", 2.37),
    (V5E, "rsqrt", "f32", 2.51),
    (V5E, "logistic", "f32", 4.50),
    (V5E, "erf", "f32", 9.97),
    (V5E, "power", "f32", 19.77),
    (V6E, "exponential", "f32", 1.00),
    (V6E, "rsqrt", "f32", 1.03),
    (V6E, "logistic", "f32", 2.00),
    (V6E, "power", "f32", 10.39),
    (V5E, "logistic", "bf16", 2.06),
    (V6E, "logistic", "bf16", 2.00),
    (TPU7X, "exponential", "bf16", 1.03),
    (TPU7X, "rsqrt", "f32", 1.03),
]


def cycles(seconds, chip):
    return float(np.squeeze(seconds)) * chip.clock_hz.value


def test_a_large_matmul_takes_its_flops_over_the_peak():
    # 2 x 8192^3 FLOPs at 197e12 FLOP/s; changing the weights adds 0.3 x 128 / 8192 = 0.47%.
    seconds = matmul_seconds(1, 8192, 8192, 8192, "bf16", V5E, efficiency=1.0)
    assert seconds == pytest.approx(2 * 8192**3 / 197e12 * 1.0047, rel=1e-4)


@pytest.mark.parametrize(
    ("chip", "size", "tflops"),
    # AI-Hypercomputer/tpu-recipes at c8cfe2f, microbenchmarks, measured on devices: 827.5 TFLOP/s
    # on v6e; fractions 0.774, 0.824 and 0.829 of 1153.5 TFLOP/s on one device of TPU7x.
    [
        (V6E, 8192, 827.5),
        (TPU7X, 4096, 0.774 * 1153.5),
        (TPU7X, 16384, 0.824 * 1153.5),
        (TPU7X, 32768, 0.829 * 1153.5),
    ],
)
def test_large_matmuls_reach_the_measured_flops(chip, size, tflops):
    seconds = matmul_seconds(1, size, size, size, "bf16", chip)
    assert 2 * size**3 / seconds / 1e12 == pytest.approx(tflops, rel=0.04)


@pytest.mark.parametrize(("chip", "m", "k", "n", "scheduled"), SCHEDULED_MATMULS)
def test_matmuls_take_about_the_cycles_that_libtpu_estimates(chip, m, k, n, scheduled):
    seconds = matmul_seconds(1, m, k, n, "bf16", chip, efficiency=1.0)
    assert cycles(seconds, chip) == pytest.approx(scheduled, rel=0.25)


@pytest.mark.parametrize(("chip", "rows"), [(V5E, 128), (V6E, 256)])
def test_a_contraction_is_padded_to_the_rows_of_the_matrix_unit(chip, rows):
    def seconds(k):
        return matmul_seconds(1, 4096, k, 4096, "bf16", chip)

    assert seconds(1) == seconds(rows)
    assert seconds(rows + 1) == seconds(2 * rows) == 2 * seconds(rows)


def test_either_operand_may_stay_in_the_unit():
    assert matmul_seconds(1, 64, 512, 4096, "bf16", V5E) == matmul_seconds(
        1, 4096, 512, 64, "bf16", V5E
    )


def test_streamed_rows_are_padded_to_a_register_of_their_type():
    # bf16 packs 16 rows into a register, f32 takes 8.
    assert matmul_seconds(1, 9, 128, 128, "bf16", V5E) == matmul_seconds(
        1, 16, 128, 128, "bf16", V5E
    )
    assert matmul_seconds(1, 9, 128, 128, "f32", V5E) < matmul_seconds(1, 17, 128, 128, "f32", V5E)


def test_narrow_types_run_at_their_own_peak():
    bf16, i8 = (matmul_seconds(1, 4096, 4096, 4096, dtype, V5E) for dtype in ("bf16", "i8"))
    assert bf16 / i8 == pytest.approx(393 / 197)


def test_many_strategies_are_priced_at_once():
    m = np.array([512, 1024, 4096])[:, None]
    n = np.array([128, 100])
    together = matmul_seconds(2, m, 256, n, "bf16", V5E)
    assert together.shape == (3, 2)
    assert together[2, 1] == matmul_seconds(2, 4096, 256, 100, "bf16", V5E)


@pytest.mark.parametrize(
    ("chip", "images", "size", "window", "f_in", "f_out", "scheduled"), SCHEDULED_CONVOLUTIONS
)
def test_convolutions_take_about_the_cycles_that_libtpu_estimates(
    chip, images, size, window, f_in, f_out, scheduled
):
    seconds = convolution_seconds(
        images, (size, size), (window, window), f_in, f_out, 1, "bf16", chip, efficiency=1.0
    )
    assert cycles(seconds, chip) == pytest.approx(scheduled, rel=0.2)


@pytest.mark.parametrize(
    ("images", "size", "features", "scheduled"),
    [
        (1, 256, 128, 171_091),
        (4, 128, 128, 159_998),
        (16, 16, 512, 159_724),
        (1, 64, 512, 201_204),
    ],
)
def test_the_gradient_of_a_3x3_kernel_takes_about_the_cycles_that_libtpu_estimates(
    images, size, features, scheduled
):
    # libtpu 0.0.42.1 on v5e. As a convolution its batch is the features and its features the batch.
    seconds = convolution_seconds(
        features, (3, 3), (size, size), images, features, 1, "bf16", V5E, efficiency=1.0
    )
    assert cycles(seconds, V5E) == pytest.approx(scheduled, rel=0.4)


def test_a_strided_stem_contracts_the_pixels_that_it_steps_over():
    # libtpu 0.0.42.1 on v5e: 168_212 cycles, 146_131 of packing the result going on beside.
    stem = (256, (32, 32), (7, 7), 3, 64, 1, "bf16", V5E)
    strided = convolution_seconds(*stem, strides=(2, 2), efficiency=1.0)
    assert cycles(strided, V5E) == pytest.approx(168_212, rel=0.4)
    assert cycles(convolution_seconds(*stem, efficiency=1.0), V5E) > 3 * cycles(strided, V5E)


def test_zeros_between_the_elements_of_an_input_are_not_multiplied():
    # libtpu 0.0.42.1 on v5e: 29_120 cycles for the gradient of a stride of two.
    gradient = (256, (8, 8), (3, 3), 256, 128, 1, "bf16", V5E)
    spread = convolution_seconds(*gradient, spread=4, efficiency=1.0)
    assert 4 * spread == pytest.approx(convolution_seconds(*gradient, efficiency=1.0))
    assert cycles(spread, V5E) == pytest.approx(29_120, rel=0.4)


def test_a_pointwise_convolution_is_a_matmul():
    convolution = convolution_seconds(8, (16, 16), (1, 1), 256, 512, 1, "bf16", V5E)
    assert convolution[0] == matmul_seconds(1, 8 * 16 * 16, 256, 512, "bf16", V5E)


def test_groups_are_convolutions_of_their_own():
    # Wide enough features that no window is folded into the contraction.
    grouped = convolution_seconds(8, (32, 32), (3, 3), 128, 512, 4, "bf16", V5E)
    alone = convolution_seconds(8, (32, 32), (3, 3), 128, 128, 1, "bf16", V5E)
    assert grouped == pytest.approx(4 * alone)


def test_a_depthwise_convolution_runs_on_the_vector_unit():
    # A multiply and an add for each output and position of the window.
    seconds = convolution_seconds(8, (32, 32), (3, 3), 1, 256, 256, "bf16", V5E)
    assert seconds == pytest.approx(vector_seconds(8 * 32 * 32 * 256 * 9, "bf16", V5E, 2.0))


def test_plain_vector_operations_run_at_the_published_rate():
    # Austin et al., How to Scale Your Model, appendix C: 8 x 128 lanes, 4 operations each, on two
    # cores at 1.75 GHz: 1.43e13 a second on v5p.
    assert 1e9 / vector_seconds(1e9, "f32", V5P) == pytest.approx(1.43e13, rel=0.01)


def test_elements_are_padded_to_whole_registers():
    assert vector_seconds(1, "f32", V5E) == vector_seconds(8 * 128, "f32", V5E)
    assert vector_seconds(8 * 128 + 1, "f32", V5E) == 2 * vector_seconds(1, "f32", V5E)


@pytest.mark.parametrize(("chip", "op", "dtype", "bundles"), SCHEDULED_VECTOR_OPS)
def test_operations_take_about_the_bundles_that_libtpu_schedules(chip, op, dtype, bundles):
    seconds = vector_seconds(8 * 128, dtype, chip, vector_ops(op))
    assert cycles(seconds, chip) == pytest.approx(bundles, rel=0.2)


def test_a_transcendental_takes_two_cycles_on_v4():
    # Measured on a device: github.com/ayaka14732/pallas-tpu-tutorial, chapter 1, section 7. Two
    # cores share the registers.
    seconds = vector_seconds(2 * 8 * 128, "f32", V4, vector_ops("tanh"))
    assert cycles(seconds, V4) == pytest.approx(2)


def test_tpu7x_runs_two_plain_bf16_operations_in_a_slot():
    # libtpu 0.0.42.1 schedules as many slots for bf16 [16, 128] as for f32 [8, 128].
    bf16, f32 = (vector_seconds(1e6, dtype, TPU7X) for dtype in ("bf16", "f32"))
    assert bf16 == pytest.approx(f32 / 2)
    assert vector_seconds(1e6, "bf16", V6E) == vector_seconds(1e6, "f32", V6E)


def test_operations_without_a_table_entry_take_one_slot():
    assert vector_seconds(4096, "f32", V5E, vector_ops("add")) == vector_seconds(4096, "f32", V5E)


def test_a_sort_runs_through_the_stages_of_a_bitonic_network():
    # 1024 = 2^10 keys: 55 stages (Batcher 1968), each four operations in four slots.
    assert cycles(sort_seconds(8 * 1024, 1024, "f32", V5E), V5E) == pytest.approx(55 * 8)


def test_gathered_rows_are_issued_in_pieces_of_128_elements():
    # libtpu 0.0.42.1 estimates 118568 cycles for 8192 rows of 768 on v5e, 48560 on v5p.
    assert cycles(gather_seconds(8192 * 768, V5E), V5E) == pytest.approx(118_568, rel=0.25)
    assert cycles(gather_seconds(8192 * 768, V5P), V5P) == pytest.approx(48_560, rel=0.25)


@pytest.mark.parametrize(
    ("chip", "bytes_per_second"),
    # AI-Hypercomputer/tpu-recipes at c8cfe2f, microbenchmarks: copies; one of two devices of TPU7x.
    [(V6E, 1.3596e12), (TPU7X, 6.42e12 / 2)],
)
def test_copies_reach_the_measured_bandwidth(chip, bytes_per_second):
    assert 1e9 / hbm_seconds(1e9, chip) == pytest.approx(bytes_per_second, rel=0.03)


def test_a_kernel_takes_as_long_as_its_slowest_unit():
    seconds = roofline_seconds(np.array([1.0, 5.0]), np.array([2.0, 1.0]), 3.0)
    assert seconds.tolist() == [3.0, 5.0]
