"""Chip profiles: complete, sourced, and refused with reasons when malformed."""

import json

import pytest
from pydantic import BaseModel

from shardwright.errors import InputError
from shardwright.hardware_profiles import ChipProfile, chip_names, load_chip, parse_chip

GENERATIONS = ["v2", "v3", "v4", "v5e", "v5p", "v6e", "tpu7x"]


def as_object(chip="v5e"):
    return load_chip(chip).model_dump(mode="json")


def test_seven_generations_are_bundled():
    assert list(chip_names()) == GENERATIONS


def sourced(profile):
    for field in ChipProfile.model_fields:
        value = getattr(profile, field)
        if field == "name" or value is None:
            continue
        yield from value.items() if isinstance(value, dict) else [(field, value)]


@pytest.mark.parametrize("name", GENERATIONS)
def test_every_value_has_a_source(name):
    values = dict(sourced(load_chip(name)))
    assert len(values) >= 30
    assert values.pop("calibration").compiler.startswith("libtpu 0.")
    for field, value in values.items():
        assert isinstance(value, BaseModel), field
        assert len(value.source) > 5, field


# Google Cloud's documentation of each generation: bf16 FLOP/s of a chip, HBM bytes/s; v2 from JAX.
@pytest.mark.parametrize(
    ("name", "flops", "bandwidth"),
    [
        ("v2", 46e12, 716e9),
        ("v3", 123e12, 900e9),
        ("v4", 275e12, 1228e9),
        ("v5e", 197e12, 819e9),
        ("v5p", 459e12, 2765e9),
        ("v6e", 918e12, 1638e9),
        ("tpu7x", 2307e12, 7380e9),
    ],
)
def test_peak_and_bandwidth_are_the_published_ones(name, flops, bandwidth):
    chip = load_chip(name)
    assert chip.peak_flops["bf16"].value == flops
    assert chip.hbm_bandwidth.value == bandwidth


@pytest.mark.parametrize("name", GENERATIONS)
def test_clock_and_matrix_units_make_the_peak(name):
    chip = load_chip(name)
    rows, columns = chip.mxu_shape.value
    cells = chip.mxus_per_tensorcore.value * chip.tensorcores_per_chip.value * rows * columns
    flops_a_cycle = 2 * cells * chip.mxu_macs_per_cell_per_cycle.value
    assert flops_a_cycle * chip.clock_hz.value == pytest.approx(
        chip.peak_flops["bf16"].value, rel=1e-3
    )


# Clocks that are printed: v2 and v3 in Jouppi et al. (CACM 2020), v5e in How to Scale Your Model.
@pytest.mark.parametrize(
    ("name", "printed"), [("v2", 700e6), ("v3", 940e6), ("v5e", 1.5e9)], ids=str
)
def test_derived_clock_is_the_printed_one(name, printed):
    assert load_chip(name).clock_hz.value == pytest.approx(printed, rel=0.01)


@pytest.mark.parametrize("name", GENERATIONS)
def test_effective_link_bandwidth_is_not_above_nominal(name):
    chip = load_chip(name)
    assert chip.ici_link_bandwidth.value <= chip.ici_link_bandwidth_nominal.value


def test_a_device_is_half_a_chip_where_a_chip_has_two():
    chip = load_chip("tpu7x")
    assert chip.device_peak_flops("bf16") == 1153.5e12
    assert chip.device_hbm_bytes == 96 * 2**30
    assert chip.device_hbm_bandwidth == 3.69e12
    assert (chip.device_tensorcores, chip.device_mxus) == (1, 2)
    assert chip.device_dcn_bandwidth == 6.25e9
    assert chip.device_vmem_bytes == 64 * 2**20


def test_a_device_is_a_whole_chip_where_two_cores_make_one():
    chip = load_chip("v5p")
    assert chip.device_peak_flops("bf16") == 459e12
    assert (chip.device_tensorcores, chip.device_mxus) == (2, 8)
    assert chip.device_vpu_lanes == 2 * 8 * 128 * 4
    assert chip.device_vmem_bytes == 128 * 2**20


@pytest.mark.parametrize(
    ("chip", "dtype", "flops"),
    [
        ("v5e", "bf16", 197e12),
        ("v5e", "bfloat16", 197e12),
        ("v5e", "f16", 197e12),
        ("v5e", "f32", 197e12),
        ("v5e", "float32", 197e12),
        ("v5e", "i8", 393e12),
        ("v5e", "ui8", 393e12),
        ("v5e", "int8", 393e12),
        ("v5e", "i4", 788e12),
        ("v5e", "f8E4M3FN", 197e12),
        ("v5e", "i32", 197e12),
        ("v5e", "c64", 197e12 / 4),
        ("tpu7x", "f8E4M3FN", 2307e12),
        ("tpu7x", "float8_e5m2", 2307e12),
        ("tpu7x", "i8", 1153.5e12),
        ("tpu7x", "i4", 1153.5e12),
        ("v4", "i4", 275e12),
        ("v5e", "complex<f32>", 197e12 / 4),
        ("v5e", "complex128", 197e12 / 4),
    ],
)
def test_peak_by_element_type(chip, dtype, flops):
    assert load_chip(chip).device_peak_flops(dtype) == flops


def test_f32_at_higher_precision_runs_several_bf16_passes():
    chip = load_chip("v5e")
    assert chip.device_peak_flops("f32", "high") == 197e12 / 3
    assert chip.device_peak_flops("f32", "highest") == 197e12 / 6
    assert chip.device_peak_flops("bf16", "highest") == 197e12


def test_an_unknown_element_type_is_refused():
    with pytest.raises(InputError, match=r"'string' is not known.*bf16, f32"):
        load_chip("v5e").device_peak_flops("string")


def test_a_profile_loads_from_a_file_of_the_same_form(tmp_path):
    mine = as_object() | {"name": "mine"}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(mine))
    assert load_chip(path).name == "mine"
    assert load_chip(str(path)) == load_chip(path)


def test_the_digest_is_of_the_content():
    same = parse_chip(as_object())
    assert same.digest == load_chip("v5e").digest
    assert hash(same) == hash(load_chip("v5e"))
    other = as_object()
    other["hbm_bytes"]["value"] += 1
    assert parse_chip(other).digest != same.digest


def test_an_unknown_chip_lists_the_known_ones():
    with pytest.raises(InputError, match=r"no chip called 'v9'.*v2, v3, v4, v5e, v5p, v6e, tpu7x"):
        load_chip("v9")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"absent\.json.*cannot be read"):
        load_chip(tmp_path / "absent.json")


def changed(path, value):
    profile = as_object("tpu7x")
    *way, last = path
    place = profile
    for key in way:
        place = place[key]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return profile


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("hbm_bytes",), None, r"hbm_bytes: Field required"),
        (("hbm_bytes", "source"), None, r"hbm_bytes\.source: Field required"),
        (("hbm_bytes", "source"), "", r"hbm_bytes\.source: .*at least 1"),
        (
            ("hbm_bandwidth", "value"),
            -1,
            r"hbm_bandwidth\.value: .*greater than or equal",
        ),
        (("hbm_bandwidth", "value"), 7380, r"hbm_bandwidth\.value: .*greater than or equal"),
        (("ici_link_bandwidth", "value"), 1e30, r"ici_link_bandwidth\.value: .*less than or equal"),
        (("hbm_bandwidth", "value"), True, r"hbm_bandwidth\.value: .*not true or false"),
        (("hbm_bytes", "value"), True, r"hbm_bytes\.value: .*not true or false"),
        (("hbm_bytes", "value"), 192, r"hbm_bytes\.value: .*greater than or equal to 65536"),
        (("clock_hz", "value"), 2.2, r"clock_hz\.value: .*greater than or equal to 1000000"),
        (("tensorcores_per_chip", "value"), 3, "jax_devices_per_chip=2 does not divide"),
        (("hbm_bandwidth", "value"), "fast", r"hbm_bandwidth\.value: .*number"),
        (("torus_dimensions", "value"), 4, r"torus_dimensions\.value"),
        (("frequency",), {"value": 1, "source": "me"}, r"frequency: Extra inputs"),
        (("peak_flops", "bf16"), None, r"peak_flops: .*bf16 is needed"),
        (("core_link_bandwidth",), None, r"core_link_bandwidth is needed"),
        (("largest_pod", "value"), [16, 16], r"\[16, 16\] does not have 3 dimensions"),
        (("wraparound", "value", "rule"), "never", r"wraparound\.value"),
        (("slices", "value", "cube_edge"), None, r"cube_edge and largest_cube_slice_chips"),
    ],
)
def test_a_malformed_profile_is_refused_with_the_field_and_the_reason(path, value, message):
    with pytest.raises(InputError, match=message):
        parse_chip(changed(path, value), where="mine.json")


def test_a_file_that_is_not_json_is_refused(tmp_path):
    path = tmp_path / "broken.json"
    path.write_text("{")
    with pytest.raises(InputError, match=r"broken\.json: file: Invalid JSON"):
        load_chip(path)
