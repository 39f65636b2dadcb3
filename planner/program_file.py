"""What a program's module carries besides its operations: the names that JAX knows it by.

StableHLO has arguments and results by number. A program that is written to a file keeps their
paths, its name and its donated arguments in one attribute of the module, so that a plan of the
file is a plan of the function that it was traced from.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from shardwright.errors import InputError
from shardwright.planner import mlir
from shardwright.planner.mlir import ir

_ATTRIBUTE = "shardwright.program"
_LONGEST = 1000


class ProgramNames(BaseModel):
    """The names of a program.

    Attributes:
      name: of the function.
      in_paths: paths of the arguments of main, in order, as `jax.tree_util.keystr` writes them.
      out_paths: the same for the results.
      donate_argnums: positional arguments of the function whose buffers the results take over.
      in_inner_dims, out_inner_dims: path -> dimensions of the data of one random key.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str = Field(max_length=_LONGEST)
    in_paths: list[str]
    out_paths: list[str]
    donate_argnums: list[int] = Field(default_factory=list)
    in_inner_dims: dict[str, NonNegativeInt] = Field(default_factory=dict)
    out_inner_dims: dict[str, NonNegativeInt] = Field(default_factory=dict)


def write_names(module: Any, names: ProgramNames) -> bytes:
    """MLIR bytecode of a module, with its locations and with names for `take_names`."""
    with module.context:
        module.operation.attributes[_ATTRIBUTE] = ir.StringAttr.get(names.model_dump_json())
        bytecode = io.BytesIO()
        module.operation.write_bytecode(bytecode)
        return bytecode.getvalue()


def take_names(module: Any, where: str) -> ProgramNames | None:
    """Takes the names out of a module whose context is current; None where it has none.

    Raises:
      InputError: they are damaged, or are not as many as main's arguments and results.
    """
    attributes = module.operation.attributes
    if _ATTRIBUTE not in attributes:
        return None
    block = mlir.entry_block(mlir.main_function(module))
    counts = len(block.arguments), len(mlir.last_operation(block).operands)
    try:
        names = ProgramNames.model_validate_json(str(ir.StringAttr(attributes[_ATTRIBUTE]).value))
        _check(names.in_paths, counts[0], "in_paths")
        _check(names.out_paths, counts[1], "out_paths")
    except (ValidationError, ValueError) as error:
        told = error.errors()[0] if isinstance(error, ValidationError) else None
        reason = f"{'.'.join(map(str, told['loc']))}: {told['msg']}" if told else str(error)
        raise InputError(
            f"the attribute {_ATTRIBUTE} of the module is damaged ({reason[:200]})",
            where=where,
            do="Write the program again with Program.to_stablehlo, or leave the attribute out",
        ) from None
    del attributes[_ATTRIBUTE]
    return names


def _check(paths: Sequence[str], count: int, kind: str) -> None:
    if len(paths) != count or len(set(paths)) != count:
        raise ValueError(f"{kind}: {count} different paths are wanted")
    if any(len(path) > _LONGEST for path in paths):
        raise ValueError(f"{kind}: a path is longer than {_LONGEST} characters")
