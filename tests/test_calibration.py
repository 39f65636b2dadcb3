"""Terms fitted to compiled samples, against samples of known terms and the data that ships."""

import json
from importlib import resources

import pytest

from shardwright.cost_models.calibrating import MEASURED, Sample, corrected, fit, predicted_cycles
from shardwright.errors import InputError
from shardwright.hardware_profiles.calibration import UNCALIBRATED
from shardwright.hardware_profiles.chip import chip_names, load_chip
from shardwright.planner.calibration import calibrated, check_families

V5E = load_chip("v5e")
BYTES_A_CYCLE = 819e9 / 1.503e9


def elementwise(dtype: str, elements: int, arrays: int, width: int, cycles: float) -> Sample:
    sizes = {"elements": elements, "reads": arrays - 1, "operations": arrays, "transcendental": 0}
    return Sample("elementwise", dtype, sizes, 1, round(cycles), elements * arrays * width, 0.0)


def streams(dtype: str, width: int, beside: float) -> list[Sample]:
    """Kernels at 0.8 of the bandwidth that take 1000 cycles and `beside` a register more."""
    return [
        elementwise(
            dtype,
            n,
            arrays,
            width,
            n * arrays * width / (0.8 * BYTES_A_CYCLE) + 1000 + beside * n / 1024,
        )
        for n in (2**21, 2**24)
        for arrays in (2, 3, 4)
    ]


def test_bandwidth_and_fixed_cycles_come_from_elementwise_kernels() -> None:
    terms = fit(streams("f32", 4, 0.0), V5E, "made up")
    assert terms.hbm_efficiency == pytest.approx(0.8, rel=1e-3)
    assert terms.kernel_cycles == pytest.approx(1000, rel=0.01)


def test_what_narrow_types_add_is_what_the_traffic_leaves() -> None:
    terms = fit(streams("f32", 4, 0.0) + streams("bf16", 2, 9.0), V5E, "made up")
    assert terms.register_cycles["bf16"] == pytest.approx(9.0, rel=0.02)


def test_terms_without_samples_are_those_of_a_chip_that_is_not_calibrated() -> None:
    terms = fit([], V5E, "made up")
    assert terms.matmul_efficiency == UNCALIBRATED.matmul_efficiency


def test_measurements_correct_the_compiler() -> None:
    chip = load_chip("v6e")
    terms = corrected(chip.calibration.as_compiled(), chip)
    # 827.474 of 918 TFLOP/s, 1359.6 of 1638 GB/s: AI-Hypercomputer/tpu-recipes at c8cfe2f.
    reached = terms.matmul_efficiency * terms.matmul_correction.factor
    assert reached == pytest.approx(827.474 / 918, rel=1e-6)
    assert terms.hbm_efficiency * terms.hbm_correction.factor == pytest.approx(1359.6 / 1638)
    assert set(MEASURED) == {"v6e", "tpu7x"}


@pytest.mark.parametrize("name", chip_names())
def test_shipped_terms_are_those_of_the_shipped_samples(name: str) -> None:
    file = resources.files("shardwright.hardware_profiles").joinpath("calibrated", f"{name}.json")
    data = json.loads(file.read_text())
    chip = load_chip(name)
    again = calibrated(chip, [Sample(**s) for s in data["samples"]], data["terms"]["compiler"])
    assert again.terms.hbm_efficiency == pytest.approx(chip.calibration.hbm_efficiency, rel=1e-6)
    assert again.terms.matmul_efficiency == pytest.approx(
        chip.calibration.matmul_efficiency, rel=1e-3
    )


@pytest.mark.parametrize("name", chip_names())
def test_the_model_agrees_with_the_compiler_on_products_and_elementwise_kernels(name: str) -> None:
    file = resources.files("shardwright.hardware_profiles").joinpath("calibrated", f"{name}.json")
    families = {f["family"]: f for f in json.loads(file.read_text())["families"]}
    assert families["elementwise"]["median_error"] < 0.06
    assert families["matmul"]["median_error"] < 0.12


def test_families_that_the_compiler_has_no_estimate_for_predict_nothing() -> None:
    assert predicted_cycles(Sample("sort", "f32", {}, 1, None, 0.0, 0.0), V5E) is None


def test_an_unknown_family_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(InputError, match="convolution"):
        check_families(["kernels"])
