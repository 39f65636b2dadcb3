"""Training choices that decide what fits: forms of a reference model to be planned together."""

from __future__ import annotations

import itertools
import typing
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardwright.errors import InputError
from shardwright.models.families import Options
from shardwright.models.registry import build, checked_options

if TYPE_CHECKING:
    from shardwright.planner.variants import Variant

Choices = Mapping[str, Sequence[Any] | str]
"""Option -> its values, or "auto"."""

_Combination = Sequence[tuple[str, Any]]

AUTO = "auto"
"""All values of an option that are worth trying."""
MOST_VARIANTS = 64

_PROJECTIONS = ["query_proj", "key_proj", "value_proj"]
REMAT_POLICIES: dict[str, dict[str, Any]] = {
    "none": {"remat": "none"},
    "dots": {"remat": "dots"},
    "save_dot_except_mlpwi": {"remat": "names", "saved": [*_PROJECTIONS, "out_proj", "mlpwo"]},
    "save_dot_except_mlp": {"remat": "names", "saved": [*_PROJECTIONS, "out_proj"]},
    "save_qkv_proj": {"remat": "names", "saved": _PROJECTIONS},
    "save_out_proj": {"remat": "names", "saved": ["out_proj"]},
    "full": {"remat": "full"},
}
"""Policies by name, from what keeps most to what keeps least.

Those of named activations are MaxText's (`src/MaxText/layers/decoders.py`, get_remat_policy).
"""
_AUTO_REMAT = ("none", "dots", "save_dot_except_mlpwi", "save_qkv_proj", "full")
_AUTO_MICROBATCHES = (1, 2, 4, 8)
_AUTO_STAGES = (1, 2, 4, 8, 16)
_MICROBATCHES_A_STAGE = 4
"""With as many the bubble is negligible. Source: Huang et al., GPipe (2019), section 2.3."""


def model_variants(name: str, options: Mapping[str, Any], choices: Choices) -> dict[str, Variant]:
    """Every combination of choices for a reference model, as `plan` takes them.

    Args and Raises: those of `combinations`.
    """
    from shardwright.planner.variants import Variant

    found = {}
    for label, chosen in combinations(name, options, choices).items():
        model = build(name, **{**options, **chosen})
        found[label] = Variant(
            model.step,
            model.example_args,
            model.donate_argnums,
            float(model.model_flops_per_step),
            model.tokens_per_step,
            chosen,
        )
    return found


def combinations(
    name: str, options: Mapping[str, Any], choices: Choices
) -> dict[str, dict[str, Any]]:
    """Every combination of choices for a reference model, by a name that tells it.

    Args:
      name: of the model.
      options: that all forms share.
      choices: option -> its values, or "auto" for remat, microbatches, stages and mu_dtype. Values
        of remat may also be names of `REMAT_POLICIES`. Where stages are chosen and microbatches are
        not given, a pipeline has about four a stage.

    Raises:
      InputError: the model has no such option, a value does not suit it, or there are too many
        combinations.
    """
    base = checked_options(name, dict(options))
    columns = []
    for option, values in choices.items():
        if option not in type(base).model_fields:
            raise InputError(
                f"it has no option {option!r} to choose",
                where=f"model {name!r}",
                do=f"Its options are {', '.join(sorted(type(base).model_fields))}",
            )
        listed = _auto(name, option, base) if isinstance(values, str) else list(values)
        columns.append([(option, value) for value in dict.fromkeys(listed)])
    found = {}
    for one in itertools.product(*columns):
        named = _with_microbatches(one, base)
        found[", ".join(f"{option}={value}" for option, value in named)] = _chosen(named)
    if not 0 < len(found) <= MOST_VARIANTS:
        raise InputError(
            f"these choices make {len(found)} variants, and 1 to {MOST_VARIANTS} are "
            "searched together",
            where=f"model {name!r}",
            do="Give fewer values",
        )
    for chosen in found.values():
        checked_options(name, {**options, **chosen})
    return found


def _with_microbatches(combination: _Combination, base: Options) -> _Combination:
    """A combination, with the microbatches of a pipeline where nothing tells them."""
    given = dict(combination)
    stages = given.get("stages", 1)
    if stages == 1 or "microbatches" in given or getattr(base, "microbatches", 1) > 1:
        return combination
    batch = given.get("batch", getattr(base, "batch", 1))
    most = _MICROBATCHES_A_STAGE * stages
    count = max((n for n in range(1, most + 1) if batch % n == 0), default=1)
    return (*combination, ("microbatches", count))


def _chosen(combination: _Combination) -> dict[str, Any]:
    chosen: dict[str, Any] = {}
    for option, value in combination:
        policy = REMAT_POLICIES.get(value) if option == "remat" else None
        chosen |= policy or {option: value}
    return chosen


def _auto(name: str, option: str, base: Options) -> list[Any]:
    field = type(base).model_fields[option]
    if option == "remat":
        taken = _literals(field.annotation)
        return [policy for policy in _AUTO_REMAT if REMAT_POLICIES[policy]["remat"] in taken]
    if option == "microbatches":
        return [count for count in _AUTO_MICROBATCHES if base.batch % count == 0]
    if option == "stages":
        blocks = getattr(base, "blocks", 1)
        return [stages for stages in _AUTO_STAGES if blocks % stages == 0]
    if option == "mu_dtype":
        return _literals(field.annotation)
    raise InputError(
        f"no values of {option} are known to be worth trying",
        where=f"model {name!r}",
        do="List them, such as 1024,2048; auto is for remat, microbatches, stages and mu_dtype",
    )


def _literals(annotation: Any) -> list[Any]:
    """The values that a Literal, or a union with one, names."""
    found: list[Any] = []
    for part in typing.get_args(annotation):
        if isinstance(part, str):
            found.append(part)
        else:
            found += _literals(part)
    return found
