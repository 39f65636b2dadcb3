"""What a program is, for people who uploaded it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from shardwright.errors import InputError
from shardwright.planner import mlir
from shardwright.planner.program import Program, Tensor
from shardwright.planner.program_facts_schema import ProgramFacts, TensorFacts

_MOST_TENSORS = 50_000


def program_facts(program: Program) -> ProgramFacts:
    """What is in a program.

    Raises:
      InputError: it has more than 50,000 inputs and outputs.
    """
    count = len(program.inputs) + len(program.outputs)
    if count > _MOST_TENSORS:
        raise InputError(
            f"the program has {count} inputs and outputs, and {_MOST_TENSORS} at most can be shown",
            where="program",
            do="Stack arrays of one shape",
        )
    with program.module() as module:
        names = Counter(_operations(mlir.entry_block(mlir.main_function(module))))
    return ProgramFacts(
        name=program.name,
        fingerprint=program.fingerprint,
        inputs=_tensors(program.inputs),
        outputs=_tensors(program.outputs),
        donated=[program.inputs[i].path for i in sorted(set(program.aliases.values()))],
        mesh=program.mesh_axes,
        operations=dict(sorted(names.items(), key=lambda item: (-item[1], item[0]))),
    )


def _operations(block: Any) -> Iterator[str]:
    pending = [block]
    while pending:
        for op in mlir.walk_block(pending.pop()):
            if op.name not in ("func.return", "stablehlo.return", "sdy.return"):
                yield str(op.name)
            pending += [inner for region in op.regions for inner in region.blocks]


def _tensors(tensors: Sequence[Tensor]) -> list[TensorFacts]:
    return [TensorFacts(path=t.path, shape=list(t.shape), dtype=t.dtype) for t in tensors]
