"""The tensors that a source line makes, for pins: `train.py:33`, or `train.py:33#2`."""

from __future__ import annotations

from difflib import get_close_matches

from shardwright.errors import InputError
from shardwright.planner.graph import Op, OpGraph
from shardwright.planner.nodes import NodeGraph, Port, is_trivial

_MOST_NAMED = 6
_NEAR_LINES = 3


def ports_at_line(name: str, entries: int, nodes: NodeGraph) -> tuple[Port, ...]:
    """The tensors that a pin by source line is for.

    Without a number: what the line makes in the end, wherever it runs (in loops, and again where
    it is recomputed), and not what its derivative makes. Of what it makes, the last with as many
    dimensions as the pin has entries counts, and all of the same shape. With a number: that one of
    the line's tensors that operations read, counted as `explain` counts them.

    Args:
      entries: dimensions that the pin names; with none, of the last tensor whatever it has.

    Raises:
      InputError: nothing is made at the line, or nothing with so many dimensions.
    """
    line, _, number = name.partition("#")
    graph = nodes.graph
    at_line = {op.id for op in graph.ops if _is_at(line, op.source)}
    made = [
        value
        for value in sorted(nodes.producers)
        if graph.values[value].producer in at_line and not is_trivial(graph.values[value])
    ]
    local = [v for v in made if graph.ops[graph.values[v].producer].manual]
    made = [v for v in made if v not in local]
    if not made:
        raise _nothing_at(name, line, nodes, in_region=bool(local))
    read = [value for value in made if nodes.uses.get(value)]
    if number:
        if not 1 <= int(number) <= len(read):
            raise InputError(
                f"the line makes {len(read)} tensors that are read, and there is no number "
                f"{number}",
                where=f"pinned {name}",
                do=f"Use one of {_told(read, graph)}",
            )
        chosen = [read[int(number) - 1]]
        if entries > len(graph.values[chosen[0]].shape):
            raise _wrong_rank(name, entries, chosen, graph)
    else:
        chosen = _end(made, at_line, entries, graph)
        if not chosen:
            raise _wrong_rank(name, entries, read or made, graph)
    return tuple(nodes.producers[value] for value in chosen)


def _end(made: list[int], at_line: set[int], entries: int, graph: OpGraph) -> list[int]:
    """What a line makes in the end, everywhere."""
    producers = {value: graph.ops[graph.values[value].producer] for value in made}
    forward = [value for value in made if not _is_derivative(producers[value], graph)]
    found = [
        value
        for value in forward or made
        if not _in_own_loop(producers[value], at_line, graph)
        and (not entries or len(graph.values[value].shape) == entries)
    ]
    last = graph.values[found[-1]].shape if found else None
    return [value for value in found if graph.values[value].shape == last]


def _is_derivative(op: Op, graph: OpGraph) -> bool:
    """Whether JAX made an operation as the transpose of another; what is recomputed is none.

    Names inside loops begin anew, so the loops around are looked at where an operation's tells
    nothing.
    """
    location, loop = op.key.location, op.loop
    while True:
        if "rematted_computation" in location:
            return False
        if "transpose(" in location:
            return True
        if loop < 0:
            return False
        location, loop = graph.loops[loop].key.location, graph.loops[loop].parent


def _in_own_loop(op: Op, at_line: set[int], graph: OpGraph) -> bool:
    """Whether an operation is part of how a loop of the same line runs."""
    return op.loop >= 0 and graph.loops[op.loop].first_op - 1 in at_line


def _is_at(line: str, source: str) -> bool:
    return bool(source) and f"/{source}".endswith("/" + line.lstrip("/"))


def _told(values: list[int], graph: OpGraph) -> str:
    def one(number: int, value: int) -> str:
        tensor = graph.values[value]
        op = graph.ops[tensor.producer].name.removeprefix("stablehlo.")
        return f"#{number} {op} {tensor.dtype}{list(tensor.shape)}"

    more = "" if len(values) <= _MOST_NAMED else f" and {len(values) - _MOST_NAMED} more"
    return ", ".join(one(n, v) for n, v in enumerate(values[:_MOST_NAMED], start=1)) + more


def _wrong_rank(name: str, entries: int, values: list[int], graph: OpGraph) -> InputError:
    return InputError(
        f"the pin has {entries} entries, and no tensor made there has {entries} dimensions",
        where=f"pinned {name}",
        do=f"Give one entry a dimension; the line makes {_told(values, graph)}",
    )


def _nothing_at(name: str, line: str, nodes: NodeGraph, *, in_region: bool) -> InputError:
    if in_region:
        return InputError(
            "what the line makes is local to a shard_map, whose own specs shard it",
            where=f"pinned {name}",
            do="Change the specs of the shard_map, or pin what goes into or comes out of it",
        )
    graph = nodes.graph
    lines = {graph.ops[graph.values[v].producer].source for v in nodes.producers
             if graph.values[v].producer >= 0}  # fmt: skip
    lines.discard("")
    file, _, number = line.rpartition(":")
    same = [one for one in lines if _is_at(file, one.rpartition(":")[0])]
    same.sort(key=lambda one: abs(int(one.rpartition(":")[2]) - int(number)))
    near = same[:_NEAR_LINES] or get_close_matches(line, lines, n=_NEAR_LINES, cutoff=0.0)
    return InputError(
        "the program makes no tensor at this line",
        where=f"pinned {name}",
        do=f"Use a line that does: {', '.join(near)}"
        if near
        else "Pin arguments by path: this program tells no source lines",
    )
