"""Scheduled HLO read back: types, groups of collectives, how often things run, what is alive."""

import numpy as np
import pytest

from shardwright.hardware_profiles.mesh import meshes_for_shape
from shardwright.hardware_profiles.slices import parse_slice
from shardwright.planner.compiled import (
    group_axes,
    module_collectives,
    read_collectives,
    read_groups,
    slice_positions,
)
from shardwright.planner.compiled_memory import compiled_peak
from shardwright.planner.hlo import parse_hlo
from shardwright.planner.plan_schema import CollectiveModel, EstimateModel
from shardwright.planner.verification_report import axes_across, compare_collectives

MESH = {"x": 4, "y": 2}


def groups(text: str) -> list[list[int]]:
    return read_groups(text).tolist()  # type: ignore[no-any-return]


def test_listed_groups_are_read_as_written() -> None:
    assert groups("replica_groups={{0,2},{1,3}}, dimensions={0}") == [[0, 2], [1, 3]]


def test_iota_groups_are_counted_in_rows() -> None:
    assert groups("replica_groups=[2,4]<=[8], x") == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_transposed_iota_groups_are_counted_in_columns() -> None:
    assert groups("replica_groups=[2,4]<=[4,2]T(1,0), x") == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_groups_along_an_axis_of_a_mesh() -> None:
    text = "replica_groups=mesh['a'=4,'b'=2] {'a'}, x"
    assert groups(text) == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_groups_of_a_mesh_whose_devices_are_in_another_order() -> None:
    """As [4, 2], transposed: 0 2 4 6 1 3 5 7; pairs along the first axis of [2, 4]."""
    text = "replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}, x"
    assert groups(text) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_groups_along_a_part_of_an_axis() -> None:
    text = "replica_groups=mesh['a'=8] {'a':(2)2}, x"
    assert groups(text) == [[0, 2], [1, 3], [4, 6], [5, 7]]


def test_permutes_are_pairs() -> None:
    assert groups("source_target_pairs={{0,1},{1,0}}") == [[0, 1], [1, 0]]


@pytest.mark.parametrize(
    ("group", "axes"),
    [
        ([[0, 2, 4, 6]], ("x",)),
        ([[0, 1]], ("y",)),
        ([list(range(8))], ("x", "y")),
        ([[0, 2], [4, 6]], ("x:2",)),
        ([[3]], ()),
    ],
)
def test_groups_become_axes_of_the_mesh(group: list[list[int]], axes: tuple[str, ...]) -> None:
    assert group_axes(np.array(group), MESH) == axes


HLO = """HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }

FileNames
1 "/home/someone/model.py"

FunctionNames
1 "step"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[]{:T(128)} parameter(0)
  %b = f32[]{:T(128)} parameter(1)
  ROOT %sum = f32[]{:T(128)} add(%a, %b)
}

%all-reduce-scatter (p: bf16[64,128]) -> bf16[16,128] {
  %p = bf16[64,128]{1,0:T(8,128)(2,1)} parameter(0)
  %whole = bf16[64,128]{1,0:T(8,128)(2,1)} all-reduce(%p), channel_id=5, \
replica_groups={{0,2,4,6},{1,3,5,7}}, to_apply=%add
  ROOT %cut = bf16[16,128]{1,0:T(8,128)(2,1)} slice(%whole), slice={[0:16], [0:128]}
}

%start_gather (q: f32[8,128]) -> f32[64,128] {
  %q = f32[8,128]{1,0:T(8,128)} parameter(0)
  ROOT %piece = f32[64,128]{1,0:T(8,128)} all-gather(%q), channel_id=9, \
replica_groups=[1,8]<=[8], dimensions={0}
}

%condition (c: (s32[], f32[8,128])) -> pred[] {
  %c = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) parameter(0)
  %limit = s32[]{:T(128)} constant(3)
  ROOT %less = pred[]{:T(128)} constant(true)
}

%body (c: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
  %c.1 = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%c.1), index=0
  %x = f32[8,128]{1,0:T(8,128)} get-tuple-element(%c.1), index=1
  %wide = f32[32,128]{1,0:T(8,128)} broadcast(%x), dimensions={0,1}
  %joined = (f32[8,128]{1,0:T(8,128)}, f32[8,128]{1,0:T(8,128)}) all-reduce(%x, %x), \
channel_id=3, replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add, \
metadata={op_name="jit(step)/dot" stack_frame_id=1}
  %y = f32[8,128]{1,0:T(8,128)} get-tuple-element(%joined), index=0
  ROOT %next = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) tuple(%i, %y)
}

ENTRY %main (p.0: f32[8,128], p.1: bf16[64,128]) -> (f32[8,128], bf16[16,128]) {
  %p.0 = f32[8,128]{1,0:T(8,128)} parameter(0)
  %p.1 = bf16[64,128]{1,0:T(8,128)(2,1)} parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  %in = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) tuple(%zero, %p.0)
  %loop = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) while(%in), condition=%condition, body=%body
  %out = f32[8,128]{1,0:T(8,128)} get-tuple-element(%loop), index=1
  %async-collective-start = (f32[8,128]{1,0:T(8,128)}, f32[64,128]{1,0:T(8,128)}) \
fusion(%out), kind=kCustom, output_to_operand_aliasing={{0}: (0, {})}, calls=%start_gather
  %all = f32[64,128]{1,0:T(8,128)} get-tuple-element(%async-collective-start), index=1
  %near = f32[64,128]{1,0:T(8,128)S(1)} negate(%all)
  %cut.1 = bf16[16,128]{1,0:T(8,128)(2,1)} fusion(%p.1), kind=kCustom, \
calls=%all-reduce-scatter
  ROOT %result = (f32[8,128]{1,0:T(8,128)}, bf16[16,128]{1,0:T(8,128)(2,1)}) \
tuple(%out, %cut.1)
}
"""


def test_collectives_of_a_module() -> None:
    found = {c.kind: c for c in read_collectives(HLO)}
    assert set(found) == {"all_gather", "all_reduce", "reduce_scatter"}
    joined = found["all_reduce"]
    assert (joined.count, joined.arrays, joined.nbytes) == (3, 2, 2 * 8 * 128 * 4)
    assert (joined.source, joined.axes(MESH)) == ("/home/someone/model.py:7", ("y",))
    scattered = found["reduce_scatter"]
    assert (scattered.nbytes, scattered.axes(MESH)) == (64 * 128 * 2, ("x",))
    gathered = found["all_gather"]
    assert gathered.asynchronous
    assert (gathered.nbytes, gathered.axes(MESH)) == (64 * 128 * 4, ("x", "y"))
    assert not joined.asynchronous


def test_known_trip_count_is_taken_before_the_condition() -> None:
    text = HLO.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"12"}}')
    assert {c.kind: c.count for c in read_collectives(text)}["all_reduce"] == 12


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("f32[7,130]{1,0:T(8,128)}", 8 * 256 * 4),
        ("f32[7,130]{0,1:T(8,128)}", 136 * 128 * 4),
        ("bf16[3]{0:T(256)(128)(2,1)}", 256 * 2),
        ("pred[]{:T(128)}", 128),
        ("f32[4,5]", 20 * 4),
    ],
)
def test_arrays_are_padded_to_their_tiles(text: str, nbytes: int) -> None:
    module = parse_hlo(f"ENTRY %main () -> f32[] {{\n  ROOT %a = {text} constant(0)\n}}\n")
    assert module.computations["main"][0].arrays[0].nbytes == nbytes


def test_peak_counts_what_is_alive_together_in_hbm() -> None:
    """Arguments (4096 + 16384) throughout.

    In the loop, which works on its first argument in place: the broadcast (16384) is dead when the
    all-reduce runs, whose first result is the loop's and whose second (4096) nobody reads. After
    it: the gathered array (32768); what is negated is in VMEM. Then only the result (4096).
    """
    peak = compiled_peak(parse_hlo(HLO))
    assert peak.nbytes == 4096 + 16384 + 32768
    assert [b.name for b in peak.buffers] == ["async-collective-start", "arguments"]
    assert peak.buffers[0].array == "f32[64,128]"


def test_kernel_that_the_compiler_does_not_know_has_no_cycles() -> None:
    line = (
        '  ROOT %a = f32[4] constant(0), backend_config={"estimated_cycles":"9223372036854775807"}'
    )
    (known, unknown) = (
        parse_hlo(f"ENTRY %main () -> f32[4] {{\n{text}\n}}\n").computations["main"][0]
        for text in (line.replace("9223372036854775807", "120"), line)
    )
    assert (known.estimated_cycles, unknown.estimated_cycles) == (120, None)


ACROSS_SLICES = """HloModule jit_step, is_scheduled=true, num_partitions=4

ENTRY %main (p: bf16[64,128]) -> bf16[64,128] {
  %p = bf16[64,128]{1,0} parameter(0)
  %after = token[] after-all()
  %all-reduce.1 = bf16[64,128]{1,0} all-reduce(%p), channel_id=9, replica_groups={{0,1},{2,3}}, \
to_apply=%add
  %send.1 = (bf16[64,128]{1,0}, u32[], token[]) send(%p, %after), channel_id=2, \
is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name=\
"xla_megascale_runtime",_xla_megascale_reduce_operation="SUM",\
_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"}
  %recv.1 = (bf16[64,128]{1,0}, u32[], token[]) recv(%after), channel_id=1, \
is_host_transfer=true, frontend_attributes={_xla_megascale_transfer_type="ALL_REDUCE"}
  %send-done.1 = token[] send-done(%send.1), channel_id=2
  ROOT %recv-done.1 = (bf16[64,128]{1,0}, token[]) recv-done(%recv.1), channel_id=1
}
"""


@pytest.mark.parametrize("shape", [{"slices": 2, "data": 4}, {"data": 4, "slices": 2}])
def test_a_sum_over_slices_is_one_collective_beside_other_work(shape) -> None:
    layouts = meshes_for_shape(parse_slice("2*v5e:2x2"), shape)
    mesh = next(m for m in layouts if axes_across(m) == {"slices"})
    module = parse_hlo(ACROSS_SLICES.replace("\\\n", ""))
    within, across = module_collectives(module, slice_positions(mesh))
    assert (across.kind, across.asynchronous, across.count) == ("all_reduce", True, 1)
    assert across.nbytes == 64 * 128 * 2
    assert across.axes(shape) == ("slices",)
    assert within.axes(shape) == ("data:2",)


def test_a_gather_from_other_slices_is_told_by_what_is_gathered() -> None:
    text = ACROSS_SLICES.replace("\\\n", "").replace("ALL_REDUCE", "ALL_GATHER")
    (mesh,) = meshes_for_shape(parse_slice("2*v5e:2x2"), {"data": 8})[:1]
    _, across = module_collectives(parse_hlo(text), slice_positions(mesh))
    assert (across.kind, across.nbytes) == ("all_gather", 2 * 64 * 128 * 2)


def test_devices_of_one_slice_need_no_places() -> None:
    (mesh,) = meshes_for_shape(parse_slice("v5e:2x2"), {"data": 4})[:1]
    assert slice_positions(mesh) is None


def test_a_predicted_sum_over_slices_is_told_in_its_stages() -> None:
    told = CollectiveModel(
        kind="all_reduce", axes=["data", "slices"], nbytes=800.0, seconds=1.0, count=3.0,
        op="", source="", shape=[400], dtype="bf16", can_hide=False,
    )  # fmt: skip
    estimate = EstimateModel.model_construct(collectives=[told])
    mesh = {"slices": 2, "data": 4}
    rows = compare_collectives(estimate, (), mesh, frozenset({"slices"}))
    assert [(row.axes, row.predicted_bytes) for row in rows] == [
        (["data"], 2400.0),
        (["slices"], 600.0),
    ]
