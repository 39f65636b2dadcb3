"""The sharding rule of a kernel as people write it: "b h t d, b h s d, b h s d -> b h t d".

A name is a factor: dimensions of one name are sharded alike. "(k g)" is a dimension that consists
of two factors, k major. Arrays are separated by commas, operands from results by "->".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from shardwright.errors import InputError

Dims = tuple[tuple[str, ...], ...]
"""For each dimension of an array, the names of its factors, major to minor."""

_DIMENSION = re.compile(r"\(([^()]*)\)|([A-Za-z_]\w*)|(\S)")
_NAME = re.compile(r"[A-Za-z_]\w*")
RESERVED = frozenset({"mxu", "min", "max", "ceil"})
"""Names that mean something else in the costs of a kernel."""


@dataclass(frozen=True)
class KernelRule:
    """The rule of a kernel, for any sizes.

    Attributes:
      text: as it was written.
      operands, results: names of the factors of every dimension of every array.
      whole: factors that no axis may shard: those that the user says, and those that are not in
        every result, but for the reductions.
      reduction: factors over which shards of a kernel's results are partial sums.
    """

    text: str
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    whole: frozenset[str]
    reduction: frozenset[str]

    @property
    def factors(self) -> tuple[str, ...]:
        """All factors, in the order in which they are first written."""
        dims = (*self.operands, *self.results)
        return tuple(dict.fromkeys(f for array in dims for dim in array for f in dim))

    @property
    def shardable(self) -> tuple[str, ...]:
        """The factors that mesh axes may shard."""
        return tuple(f for f in self.factors if f not in self.whole)

    def batched(self, factor: str, operands: Sequence[bool]) -> KernelRule:
        """The rule with a new leading dimension on every result and on some operands."""
        lead: Dims = ((factor,),)
        return KernelRule(
            text=f"{self.text} (vmapped over {factor})",
            operands=tuple(
                (*lead, *dims) if has else dims
                for dims, has in zip(self.operands, operands, strict=True)
            ),
            results=tuple((*lead, *dims) for dims in self.results),
            whole=self.whole,
            reduction=self.reduction,
        )

    def sizes(
        self,
        operands: Sequence[Sequence[int]],
        results: Sequence[Sequence[int]],
        where: str,
    ) -> dict[str, int]:
        """The size of each factor for arrays of these shapes.

        Raises:
          InputError: the arrays are not as many or not of the rank that the rule says, sizes of
            one factor differ, or the parts of a dimension cannot be known.
        """
        self._check_ranks("operand", self.operands, operands, where)
        self._check_ranks("result", self.results, results, where)
        arrays = list(zip((*self.operands, *self.results), (*operands, *results), strict=True))
        pairs = [(dim, n) for dims, shape in arrays for dim, n in zip(dims, shape, strict=True)]
        sizes = solve_sizes(pairs)
        for dim, size in pairs:
            unknown = [f for f in dim if f not in sizes]
            if unknown:
                raise InputError(
                    f"the sizes of {' and '.join(unknown)} in ({' '.join(dim)}) of size {size} "
                    f"do not follow from the other dimensions in {self.text!r}",
                    where=where,
                    do="Give an operand a dimension of its own for all but one of them",
                )
            if prod(sizes[f] for f in dim) != size:
                told = f"{dim[0]} is" if len(dim) == 1 else f"({' '.join(dim)}) consists of"
                others = " and ".join(f"{sizes[f]}" for f in dim)
                raise InputError(
                    f"{told} {others} in one dimension and {size} in another, "
                    f"in {self.text!r} with operands {_shapes(operands)} and results "
                    f"{_shapes(results)}",
                    where=where,
                    do="Name dimensions of different sizes differently",
                )
        return {factor: sizes[factor] for factor in self.factors}

    def _check_ranks(
        self, kind: str, told: Sequence[Dims], shapes: Sequence[Sequence[int]], where: str
    ) -> None:
        if len(told) != len(shapes):
            raise InputError(
                f"there are {len(shapes)} {kind}s and {self.text!r} tells {len(told)}",
                where=where,
                do=f"Write the dimensions of every {kind}, separated by commas",
            )
        for number, (dims, shape) in enumerate(zip(told, shapes, strict=True)):
            if len(dims) != len(shape):
                raise InputError(
                    f"{kind} {number} has shape {tuple(shape)} and {self.text!r} tells "
                    f"{len(dims)} dimensions",
                    where=where,
                    do="Name every dimension of the array",
                )


def parse_rule(text: str, whole: str, reduction: str, where: str) -> KernelRule:
    """Reads a rule.

    Args:
      text: as in the module's description.
      whole: factors that no axis may shard, separated by spaces.
      reduction: factors over which shards of the results are to be added up.
      where: the kernel's name, for messages.

    Raises:
      InputError: it does not parse, an array has a factor twice, or `whole` or `reduction` name
        a factor that is not there, or one that cannot be added up.
    """
    if text.count("->") != 1:
        raise InputError(
            f"the rule {text!r} has no '->'" if "->" not in text else f"{text!r} has several '->'",
            where=where,
            do='Write operands -> results, as in "b h t d, b h s d -> b h t d"',
        )
    before, after = text.split("->")
    operands, results = (
        tuple(_dims(array, text, where) for array in side.split(",")) for side in (before, after)
    )
    rule = KernelRule(text, operands, results, frozenset(), frozenset())
    marked = {"whole": frozenset(whole.split()), "reduction": frozenset(reduction.split())}
    for option, names in marked.items():
        if unknown := names - set(rule.factors):
            raise InputError(
                f"{option}= names {', '.join(sorted(unknown))}, which {text!r} does not have",
                where=where,
                do=f"Its factors are {', '.join(rule.factors)}",
            )
    kept = [{f for dim in dims for f in dim} for dims in results]
    given = {f for dims in operands for dim in dims for f in dim}
    for factor in sorted(marked["reduction"]):
        if factor in marked["whole"] or factor not in given or any(factor in r for r in kept):
            raise InputError(
                f"{factor} is a reduction, but "
                + (
                    "it is to stay whole too"
                    if factor in marked["whole"]
                    else "no operand has it"
                    if factor not in given
                    else "a result has it"
                ),
                where=where,
                do="A reduction is a factor of operands that no result has",
            )
    lost = {f for f in rule.factors if f not in given or not all(f in r for r in kept)}
    return KernelRule(
        text, operands, results, marked["whole"] | lost - marked["reduction"], marked["reduction"]
    )


def solve_sizes(pairs: Iterable[tuple[tuple[str, ...], Any]]) -> dict[str, Any]:
    """The sizes of factors, from the sizes (or arrays of sizes) of dimensions made of them.

    A factor is known from a dimension in which all others are known; some may stay unknown.
    """
    known: dict[str, Any] = {}
    pending = list(pairs)
    while pending:
        left = []
        for dim, size in pending:
            unknown = [f for f in dim if f not in known]
            if len(unknown) > 1:
                left.append((dim, size))
            elif unknown:
                rest = prod(known[f] for f in dim if f in known)
                known[unknown[0]] = size // rest if np.all(rest) else size
        if len(left) == len(pending):
            break
        pending = left
    return known


def _dims(array: str, text: str, where: str) -> Dims:
    dims: list[tuple[str, ...]] = []
    for match in _DIMENSION.finditer(array.strip()):
        grouped, name, wrong = match.groups()
        names = (name,) if name else tuple((grouped or "").split())
        if wrong or not names or not all(_NAME.fullmatch(n) for n in names):
            raise InputError(
                f"{match[0]!r} in {text!r} is no dimension",
                where=where,
                do="Name every dimension by a word, or by several in parentheses: b (k g) t d",
            )
        dims.append(names)
    flat = [f for dim in dims for f in dim]
    repeated = sorted({f for f in flat if flat.count(f) > 1})
    if repeated:
        raise InputError(
            f"{array.strip()!r} has {', '.join(repeated)} twice",
            where=where,
            do="Name every dimension of one array differently",
        )
    if taken := RESERVED & set(flat):
        raise InputError(
            f"{', '.join(sorted(taken))} cannot name a factor: costs use it for something else",
            where=where,
            do="Choose another name",
        )
    return tuple(dims)


def _shapes(shapes: Sequence[Sequence[int]]) -> str:
    return ", ".join(str(tuple(shape)) for shape in shapes)
