"""Kernels of a compiled program by line of the model, beside what was predicted."""

from __future__ import annotations

import re

import pytest

from shardwright.planner.compiled_kernels import (
    KernelComparison,
    explain_kernels,
    rematerialised,
    seconds_by_line,
)
from shardwright.planner.hlo import HloModule, parse_hlo

CLOCK = 1e9
TEXT = """HloModule m, is_scheduled=true

FileNames
1 "/model/train.py"

FunctionNames
1 "step"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=1 end_column=2}
2 {file_name_id=1 function_name_id=1 line=20 end_line=20 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

%body (q: f32[8]) -> f32[8] {
  ROOT %k = f32[8] negate(%q), metadata={stack_frame_id=1}, backend_config=CYCLES(100)
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8] parameter(0)
  %w = f32[8] while(%p), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %f = f32[8] tanh(%w), metadata={stack_frame_id=2}, backend_config=CYCLES(40)
  ROOT %f.remat2 = f32[8] tanh(%w), metadata={stack_frame_id=2}, backend_config=CYCLES(60)
}
"""


@pytest.fixture
def module() -> HloModule:
    return parse_hlo(re.sub(r"CYCLES\((\d+)\)", r'{"estimated_cycles":"\1"}', TEXT))


def row(op: str, predicted_s: float, compiled_s: float) -> KernelComparison:
    return KernelComparison(
        source="train.py:9", op=op, predicted_s=predicted_s, compiled_s=compiled_s
    )


def test_seconds_of_a_line_are_of_all_runs_of_its_kernels(module: HloModule) -> None:
    found = seconds_by_line(module, CLOCK)
    assert found == {
        "/model/train.py:12": pytest.approx(500e-9),
        "/model/train.py:20": pytest.approx(100e-9),
    }


def test_kernels_that_the_compiler_computes_again_are_counted(module: HloModule) -> None:
    assert rematerialised(module, CLOCK) == (1, pytest.approx(60e-9))
    notes = list(explain_kernels([row("stablehlo.add", 1e-6, 1e-6)], {"x": 2}, module, CLOCK))
    assert notes == ["the compiler rematerialises: 1 kernels run again to save memory, 0.00 ms"]


@pytest.mark.parametrize(
    ("predicted_s", "op", "told"),
    [
        (0.25, "stablehlo.dot_general", "over y"),
        (0.5, "stablehlo.dot_general", "over x"),
        (0.125, "stablehlo.convolution", "over x x y"),
        (0.9, "stablehlo.dot_general", ""),
        (0.33, "stablehlo.dot_general", ""),
        (0.25, "stablehlo.add", ""),
    ],
)
def test_a_product_that_takes_a_multiple_of_an_axis_is_told_as_replicated(
    module: HloModule, predicted_s: float, op: str, told: str
) -> None:
    mesh = {"x": 2, "y": 4, "z": 1}
    notes = list(explain_kernels([row(op, predicted_s, 1.0)], mesh, module, CLOCK))
    assert (notes[0].partition("replicated ")[2] if notes else "") == told
