"""The predicted step as trace events."""

import json
from itertools import pairwise

import jax
import jax.numpy as jnp
import pytest

import shardwright as sw
from shardwright.cli import main
from shardwright.errors import InputError
from shardwright.models import build
from shardwright.planner.plan_schema import ScheduledLoopModel, ScheduledModel
from shardwright.planner.trace_events import trace

MICRO = 1e6
DECODER = {
    **{"layers": 4, "d_model": 1024, "heads": 8, "kv_heads": 8, "d_ff": 4096, "vocab": 8192},
    **{"sequence": 1024, "batch": 32},
}


@pytest.fixture(scope="module", params=["decoder", "convolution", "nested"])
def plan(request):
    """Plans with a scanned loop and gathers ahead, with halos, and with loops in loops."""
    if request.param == "decoder":
        model = build("llama3-8b", **DECODER)
        fn, args, donate = model.train_step, model.example_args, model.donate_argnums
    elif request.param == "convolution":
        donate = ()
        args = tuple(
            jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((1, 4096, 4096, 16), (3, 3, 16, 16))
        )

        def fn(x, w):
            for _ in range(2):
                x = jax.lax.conv_general_dilated(
                    x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
                )
            return x
    else:
        donate = (0,)
        args = tuple(jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16) for _ in range(2))

        def fn(x, w):
            def inner(x, _):
                return jnp.tanh(x @ w), None

            def outer(x, _):
                return jax.lax.scan(inner, x, None, length=3)[0] + 1, None

            return jax.lax.scan(outer, x, None, length=5)[0]

    return sw.plan(
        fn, *args, topology="v5e:2x2", donate_argnums=donate, memory_fraction=0.5, time_limit_s=2
    ).data


def complete(events):
    return [event for event in events["traceEvents"] if event["ph"] == "X"]


def test_the_schedule_adds_up_to_compute_and_communication(plan):
    def total(entries, wanted):
        return sum(
            entry.trips * total(entry.entries, wanted)
            if isinstance(entry, ScheduledLoopModel)
            else entry.seconds * wanted(entry)
            for entry in entries
        )

    estimate = plan.estimate
    compute = total(estimate.schedule, lambda entry: entry.kind == "compute")
    communication = total(estimate.schedule, lambda entry: entry.kind != "compute")
    assert compute == pytest.approx(estimate.compute_time_s)
    assert communication == pytest.approx(estimate.collective_time_s, abs=1e-12)


def test_the_trace_is_as_long_as_the_step(plan):
    events = complete(trace(plan))
    end = max(event["ts"] + event["dur"] for event in events)
    assert min(event["ts"] for event in events) == 0
    assert end == pytest.approx(plan.estimate.step_time_s * MICRO, rel=1e-6)


def test_compute_and_exposed_communication_fill_the_step(plan):
    events = complete(trace(plan))
    compute = sum(event["dur"] for event in events if event["cat"] == "compute")
    exposed = sum(event["dur"] for event in events if event["args"].get("exposed"))
    hidden = sum(event["dur"] for event in events if event["args"].get("exposed") is False)
    estimate = plan.estimate
    assert compute == pytest.approx(estimate.compute_time_s * MICRO)
    assert exposed == pytest.approx(estimate.exposed_collective_time_s * MICRO, abs=1e-3)
    assert hidden == pytest.approx(
        (estimate.collective_time_s - estimate.exposed_collective_time_s) * MICRO, abs=1e-3
    )


def test_events_of_one_track_do_not_overlap(plan):
    tracks = {}
    for event in complete(trace(plan)):
        tracks.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in tracks.values():
        spans.sort()
        for (_, end), (start, _) in pairwise(spans):
            assert start >= end - 1e-3


def test_nothing_computes_while_an_exposed_collective_runs(plan):
    events = complete(trace(plan))
    stops = [e for e in events if e["args"].get("exposed")]
    kernels = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["cat"] == "compute")
    for stop in stops[:200]:
        begin, end = stop["ts"] + 1e-3, stop["ts"] + stop["dur"] - 1e-3
        assert not any(a < end and b > begin for a, b in kernels)


def test_it_is_of_the_trace_event_format(plan):
    # Trace Event Format: an object with traceEvents; X events have ts and dur in microseconds,
    # M events name processes and threads; pid and tid are numbers; displayTimeUnit is ms or ns.
    text = json.dumps(trace(plan), allow_nan=False)
    events = json.loads(text)
    assert events["displayTimeUnit"] in ("ms", "ns")
    named = set()
    for event in events["traceEvents"]:
        assert event["ph"] in ("X", "M")
        assert isinstance(event["name"], str)
        assert event["name"]
        assert type(event["pid"]) is int
        assert type(event["tid"]) is int
        assert isinstance(event["args"], dict)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name", "thread_sort_index")
            if event["name"] == "thread_name":
                named.add(event["tid"])
        else:
            assert event["ts"] >= 0
            assert event["dur"] > 0
            assert isinstance(event["cat"], str)
    assert {event["tid"] for event in complete(events)} <= named


def test_tracks_are_named_by_mesh_axes(plan):
    names = {
        event["args"]["name"]
        for event in trace(plan)["traceEvents"]
        if event["name"] == "thread_name"
    }
    assert "compute" in names
    for name in names - {"compute"}:
        over = name.rpartition(" over ")[2]
        assert over == "halos" or set(over.split("+")) <= plan.mesh_axes.keys()


def scheduled(kind, seconds, hides=False):
    return ScheduledModel(
        kind=kind,
        op="stablehlo.dot_general",
        source="a.py:1",
        axes=["x"],
        seconds=seconds,
        hides=hides,
    )


def with_schedule(plan, *entries):
    estimate = plan.estimate.model_copy(update={"schedule": list(entries)})
    return plan.model_copy(update={"estimate": estimate})


def test_a_gather_longer_than_its_compute_stops_it_for_the_rest(plan):
    # Two passes: 1 s of compute beside a gather of 5 s, 4 s of it alone, and what waits for it.
    loop = ScheduledLoopModel(
        entries=[
            scheduled("compute", 1.0),
            scheduled("all-gather", 5.0, hides=True),
            scheduled("compute", 3.0),
        ],
        trips=2,
        source="a.py:1",
    )
    events = complete(trace(with_schedule(plan, loop)))
    spans = [(e["name"], e["ts"] / MICRO, e["dur"] / MICRO) for e in events]
    one_pass = [("dot_general", 0.0, 1.0), ("all-gather", 0.0, 1.0), ("all-gather", 1.0, 4.0)]
    one_pass.append(("dot_general", 5.0, 3.0))
    assert spans == [(n, t + 8.0 * k, d) for k in range(2) for n, t, d in one_pass]


def test_very_many_passes_are_drawn_in_part_and_keep_their_time(plan):
    loop = ScheduledLoopModel(entries=[scheduled("compute", 1e-6)], trips=10**7, source="a.py:1")
    events = complete(trace(with_schedule(plan, loop)))
    assert len(events) < 300_000
    assert any(event["name"] == "more passes" for event in events)
    assert events[-1]["ts"] + events[-1]["dur"] == pytest.approx(10.0 * MICRO, rel=1e-6)


def test_a_plan_of_an_older_version_says_what_to_do(plan):
    with pytest.raises(InputError, match="Plan again"):
        trace(with_schedule(plan))


def test_the_command_writes_beside_the_plan(plan, tmp_path, capsys):
    path = tmp_path / "plan.json"
    path.write_text(plan.model_dump_json())
    assert main(["trace", str(path)]) == 0
    written = tmp_path / "plan.trace.json"
    assert json.loads(written.read_text()) == json.loads(json.dumps(trace(plan)))
    assert "perfetto" in capsys.readouterr()[1]
    assert main(["trace", str(path), "-o", str(tmp_path / "t.json")]) == 0
    assert (tmp_path / "t.json").read_text() == written.read_text()
