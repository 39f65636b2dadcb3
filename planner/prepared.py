"""A program with everything that no mesh changes, made once for all of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from shardwright.extensions import load_extensions
from shardwright.hardware_profiles.chip import ChipProfile
from shardwright.hardware_profiles.mesh import LogicalMesh
from shardwright.planner.collector import without_collector
from shardwright.planner.fusion import FusionPlan, plan_fusions
from shardwright.planner.graph import OpGraph
from shardwright.planner.graph_reader import build_graph
from shardwright.planner.liveness import Lifetime, lifetimes
from shardwright.planner.local_prices import LocalPrices
from shardwright.planner.mesh_bounds import Classes, count_classes, quick_bound
from shardwright.planner.named_layout import NamedLayout, tie_names
from shardwright.planner.nodes import NodeGraph, build_nodes
from shardwright.planner.pricing import MeshPricer, note_cuts
from shardwright.planner.problem import Fixed, ShardingProblem
from shardwright.planner.program import Program
from shardwright.planner.repeats import alike_nodes
from shardwright.planner.skeleton import Skeleton, build_skeleton

_MOST_NODES = 1000
"""Above this many nodes, repeated layers are tied."""


@dataclass(frozen=True)
class Prepared:
    """A program with everything that does not depend on the mesh."""

    program: Program
    graph: OpGraph = field(repr=False)
    nodes: NodeGraph = field(repr=False)
    fusions: FusionPlan = field(repr=False)
    buffers: tuple[Lifetime, ...] = field(repr=False)
    skeleton: Skeleton = field(repr=False)
    classes: dict[tuple[object, ...], tuple[tuple[int, ...] | None, Classes]] = field(
        default_factory=dict, repr=False
    )
    layout: NamedLayout | None = field(default=None, repr=False)
    prices: dict[ChipProfile, LocalPrices] = field(default_factory=dict, repr=False)

    def problem(self, mesh: LogicalMesh, fixed: Fixed | None = None) -> ShardingProblem:
        """The sharding problem on a mesh; in a large program the nodes of alike layers are tied."""
        problem = MeshPricer(self._prices_on(mesh.slice.chip), mesh, fixed or {}).price()
        if self.large:
            problem = replace(problem, alike=self._classes_of(fixed or {})[0])
        return problem if self.layout is None else tie_names(problem, self.layout)

    def quick_bound(self, mesh: LogicalMesh, fixed: Fixed, cutoff: float) -> float:
        """Seconds that no step takes less than; once they reach a cutoff they are not improved."""
        classes = self._classes_of(fixed)[1]
        return quick_bound(classes, self._prices_on(mesh.slice.chip), mesh, fixed, cutoff)

    def _classes_of(self, fixed: Fixed) -> tuple[tuple[int, ...] | None, Classes]:
        """The class of every node, in a large program, and what is in each."""
        key = tuple(sorted(fixed.items()))
        if key not in self.classes:
            alike = alike_nodes(self.skeleton, fixed) if self.large else None
            self.classes[key] = alike, count_classes(self.skeleton, alike)
        return self.classes[key]

    def expect(self, meshes: Iterable[tuple[LogicalMesh, Fixed]]) -> None:
        """Has kernels and buffers priced for all of some meshes when the first needs them."""
        for mesh, fixed in meshes:
            note_cuts(self._prices_on(mesh.slice.chip), mesh, fixed)

    def _prices_on(self, chip: ChipProfile) -> LocalPrices:
        if chip not in self.prices:
            # Those of one chip at a time: many hypothetical ones may be tried.
            self.prices.clear()
            self.prices[chip] = LocalPrices(self.skeleton, chip)
        return self.prices[chip]

    @property
    def large(self) -> bool:
        """Whether the program is too large to solve as it is, and to partition for every mesh."""
        return len(self.skeleton.kind_of) > _MOST_NODES


@without_collector()
def prepare(program: Program) -> Prepared:
    """Builds the op graph of a program and everything else that no mesh changes."""
    load_extensions()
    return prepare_graph(program, build_graph(program))


def prepare_graph(program: Program, graph: OpGraph) -> Prepared:
    """As `prepare`, of an op graph that was read before."""
    nodes = build_nodes(graph)
    fusions = plan_fusions(nodes)
    buffers = lifetimes(nodes, fusions)
    skeleton = build_skeleton(nodes, fusions, buffers)
    return Prepared(program, graph, nodes, fusions, buffers, skeleton)
