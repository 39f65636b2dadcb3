"""What operations are, apart from the values that they read and make: each form is read once.

A program of many equal layers has hundreds of times as many operations as forms of them, and the
rule and the details of a form take longer to read than everything else of an operation.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from shardwright.planner.given import MANUAL, manual_rule
from shardwright.planner.op_detail import cost_detail
from shardwright.planner.rules import RULE, Rule, RuleReader, operation_name
from shardwright.planner.shifts import ROTATING

STRUCTURED = ("stablehlo.while", "stablehlo.if", "stablehlo.case", MANUAL)
"""Operations whose regions hold operations of the program."""


@dataclass(frozen=True)
class Form:
    """What operations have in common that differ in their values, place and location alone.

    Attributes:
      number: equal for operations of equal forms.
      name, rule, detail: as of an `Op`.
    """

    number: int
    name: str
    rule: Rule | None = field(repr=False)
    detail: dict[str, Any] = field(repr=False)


class FormReader:
    """Reads the forms of the operations of a module after Shardy's populate pass.

    Args:
      mesh: the mesh that the program itself names, axis -> size.
    """

    def __init__(self, mesh: Mapping[str, int]) -> None:
        self._mesh = mesh
        self._read_rule = RuleReader()
        self._known: dict[Hashable, Form] = {}
        self._count = 0

    def __call__(self, op: Any, name: str) -> Form:
        """The form of an operation with that MLIR name."""
        if name in STRUCTURED:
            rule, detail = manual_rule(op, self._mesh) if name == MANUAL else (None, {})
            return self._new(name, rule, detail)
        attributes = op.attributes
        key: Hashable = (
            name,
            tuple((a, _attribute(op, a)) for a in attributes),
            tuple(value.type for value in op.operands),
            tuple(value.type for value in op.results),
        )
        if name in ROTATING or (RULE not in attributes and len(op.operands)):
            # What is around it counts, or may count to the author of a registered rule.
            rule, detail = self._read_rule(op), cost_detail(op)
            key = (key, rule, repr(detail))
            if key not in self._known:
                self._known[key] = self._new(operation_name(op), rule, detail)
        elif key not in self._known:
            self._known[key] = self._new(operation_name(op), self._read_rule(op), cost_detail(op))
        return self._known[key]

    def _new(self, name: str, rule: Rule | None, detail: dict[str, Any]) -> Form:
        self._count += 1
        return Form(self._count - 1, name, rule, detail)


def _attribute(op: Any, name: str) -> Hashable:
    """An attribute of an operation, or what the operation looks like with it."""
    try:
        return cast("Hashable", op.attributes[name])
    except TypeError:  # MLIR's Python bindings know no elements of complex numbers
        return str(op)
