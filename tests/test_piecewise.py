"""Partitioning by pieces against partitioning the whole program, which is the answer."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.hardware_profiles.mesh import LogicalMesh, enumerate_meshes
from shardwright.hardware_profiles.slices import parse_slice
from shardwright.models.registry import build
from shardwright.planner.constraints import value_constraints
from shardwright.planner.evaluation import evaluate_partitioned
from shardwright.planner.kernel_times import KernelTimes
from shardwright.planner.mesh_solution import boundary_shardings
from shardwright.planner.partitioned import Partitioned
from shardwright.planner.partitioning import partition
from shardwright.planner.piecewise import partition_pieces
from shardwright.planner.prepared import Prepared, prepare
from shardwright.planner.problem import ShardingProblem
from shardwright.planner.program import Program
from shardwright.planner.tied import solve_weighed

LAYERS = 4


def prepared_decoder(**options: Any) -> Prepared:
    size = {"layers": LAYERS, "batch": 32, "sequence": 64, "d_model": 256, "heads": 8, "d_ff": 512}
    built = build("gpt2-124m", **(size | {"vocab": 512} | options))
    program = Program.trace(
        built.train_step, *built.example_args, donate_argnums=built.donate_argnums
    )
    return prepare(program)


@pytest.fixture(scope="module")
def decoder() -> Prepared:
    return prepared_decoder(scan_layers=False)


@pytest.fixture(scope="module")
def mesh() -> LogicalMesh:
    return next(m for m in enumerate_meshes(parse_slice("v5e:4x4"), 2) if len(m.axes) == 2)


@pytest.fixture(scope="module")
def problem(decoder: Prepared, mesh: LogicalMesh) -> ShardingProblem:
    return decoder.problem(mesh)


@pytest.fixture(scope="module")
def best(problem: ShardingProblem) -> tuple[int, ...]:
    return solve_weighed(
        problem,
        dict.fromkeys(problem.loops, 1e-3),
        1e9,
        time_limit_s=20.0,
        seed=0,
        gap=1e-2,
        cutoff=float("inf"),
        warm_starts=(),
        untie=True,
    ).choices


def disturbed(problem: ShardingProblem, choices: Sequence[int], seed: int) -> list[int]:
    """Choices of which one in fifty is another: neither do alike layers agree nor neighbours."""
    random = np.random.default_rng(seed)
    others = list(choices)
    for node in random.choice(len(others), size=len(others) // 50, replace=False):
        others[node] = int(random.integers(len(problem.strategies[node])))
    return others


Given = tuple[Any, ...]


def constrained(prepared: Prepared, problem: ShardingProblem, choices: Sequence[int]) -> Given:
    """What both ways of partitioning take."""
    ins, outs = boundary_shardings(problem, choices)
    constraints = value_constraints(problem, choices)
    return prepared.program, prepared.graph, problem.mesh.shape, constraints, ins, outs


def assert_equal(prepared: Prepared, pieces: Partitioned, whole: Partitioned) -> None:
    graph = prepared.graph
    made = [op.id for op in graph.ops if not all(graph.values[r].free for r in op.results)]
    assert pieces.communications == whole.communications
    assert (pieces.inputs, pieces.outputs) == (whole.inputs, whole.outputs)
    assert {op: pieces.operands[op] for op in made} == {op: whole.operands[op] for op in made}
    assert {op: pieces.results[op] for op in made} == {op: whole.results[op] for op in made}
    for value in whole.values:
        assert graph.values[value].free or pieces.values[value] == whole.values[value]


def test_a_solution_is_partitioned_and_priced_as_the_whole_program(
    decoder: Prepared, problem: ShardingProblem, best: tuple[int, ...]
) -> None:
    given = constrained(decoder, problem, best)
    pieces, whole = partition_pieces(*given), partition(*given)
    assert pieces is not None
    assert_equal(decoder, pieces, whole)
    priced = [
        evaluate_partitioned(decoder.graph, decoder.fusions, decoder.buffers, one, problem.mesh)
        for one in (pieces, whole)
    ]
    assert priced[0] == priced[1]
    assert priced[0].collectives


def test_layers_that_choose_differently_are_partitioned_as_the_whole_program(
    decoder: Prepared, problem: ShardingProblem, best: tuple[int, ...]
) -> None:
    given = constrained(decoder, problem, disturbed(problem, best, seed=0))
    pieces, whole = partition_pieces(*given), partition(*given)
    assert pieces is not None
    assert_equal(decoder, pieces, whole)


def test_uneven_shards_between_pieces_are_partitioned_as_in_the_whole_program(
    mesh: LogicalMesh,
) -> None:
    decoder = prepared_decoder(scan_layers=False, layers=2, vocab=509)
    problem = decoder.problem(mesh)
    # Wherever the vocabulary can be cut it is, in parts that are not equally large.
    choices = [0] * len(problem.strategies)
    for node, rows in enumerate(problem.strategies):
        sizes = decoder.skeleton.kinds[decoder.skeleton.kind_of[node]].sizes
        cut = [number for number, size in enumerate(sizes) if size == 509]
        choices[node] = int(np.isin(rows, cut).sum(axis=1).argmax())
    given = constrained(decoder, problem, choices)
    pieces, whole = partition_pieces(*given), partition(*given)
    assert pieces is not None
    assert_equal(decoder, pieces, whole)


def test_programs_with_loops_are_left_to_be_partitioned_whole(mesh: LogicalMesh) -> None:
    scanned = prepared_decoder(scan_layers=True)
    problem = scanned.problem(mesh)
    given = constrained(scanned, problem, [0] * len(problem.strategies))
    assert partition_pieces(*given) is None


def test_alike_kernels_take_as_long_as_each_by_itself(
    decoder: Prepared,
    problem: ShardingProblem,
    best: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pieces = partition_pieces(*constrained(decoder, problem, disturbed(problem, best, seed=1)))
    assert pieces is not None
    given = decoder.graph, decoder.fusions, decoder.buffers, pieces, problem.mesh
    together = evaluate_partitioned(*given)
    monkeypatch.setattr(KernelTimes, "_alike", lambda self, fusion: fusion.ops)
    assert evaluate_partitioned(*given).compute_by_op == together.compute_by_op


def test_what_an_argmax_finds_besides_the_index_is_reduced_though_nothing_reads_it() -> None:
    def step(weights: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.argmax(x @ weights, axis=-1)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1024, 131072), (64, 1024))]
    plan = sw.plan(
        step, *shapes, topology="v5e:2x4", mesh={"a": 2, "b": 4}, time_limit_s=2,
        pinned={"[0]": P(None, ("a", "b")), "[1]": P(), "result": P()},
    )  # fmt: skip
    # Of 64 examples, the greatest in bf16 and its index in int32.
    found = [(c.kind, c.nbytes) for c in plan.estimate.collectives]
    assert found == [("all_reduce", 128), ("all_reduce", 256)]
