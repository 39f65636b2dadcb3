"""A plan as code that people paste: PartitionSpecs, pytrees and constraints with source lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from shardwright.errors import InputError
from shardwright.planner.plan_data import partition_spec
from shardwright.planner.plan_schema import ConstraintModel, PlanModel, Spec, TensorModel

_MAIN_OPS = ("dot_general", "convolution", "gather", "custom_call")
_BACKWARD = ("transpose(", "checkpoint/", "rematted_computation")
_FOREIGN = ("-packages/", "/lib/python")


def spec_code(spec: Spec) -> str:
    """A sharding as Python: "P(None, ('x', 'y'))"."""
    return repr(partition_spec(spec)).replace("PartitionSpec(", "P(", 1)


def _heading(plan: PlanModel) -> list[str]:
    axes = ", ".join(f"{axis!r}: {size}" for axis, size in plan.mesh_axes.items())
    return [
        f"# {plan.program.name} on {plan.topology}, planned by Shardwright "
        f"{plan.versions.shardwright}.",
        f"# Mesh axes {{{axes}}}; Plan.make_mesh() lays them on the torus as planned.",
    ]


def specs_code(plan: PlanModel) -> str:
    """Python that holds a PartitionSpec for every argument and result by its path.

    `specs_like(args, IN_SPECS)` makes of it a pytree of any structure, user classes too.
    """
    kept = {output for output, _ in plan.program.aliases}
    own_results = [t for i, t in enumerate(plan.program.outputs) if i not in kept]
    return "\n".join(
        [
            *_heading(plan),
            "import jax",
            "from jax.sharding import PartitionSpec as P",
            "",
            f"MESH_AXES = {plan.mesh_axes!r}",
            "",
            "# Arguments, by their paths in the tuple of arguments.",
            *_mapping("IN_SPECS", plan.program.inputs),
            "",
            "# Results that take over no argument's buffer; the others keep its sharding.",
            *_mapping("OUT_SPECS", own_results),
            "",
            "",
            "def specs_like(tree, specs):",
            '    """The specs as a pytree of the structure of `tree`."""',
            "    return jax.tree_util.tree_map_with_path(",
            "        lambda path, _: specs[jax.tree_util.keystr(path)], tree",
            "    )",
            "",
        ]
    )


def _mapping(name: str, tensors: Sequence[TensorModel]) -> list[str]:
    lines = [f"    {tensor.path!r}: {spec_code(tensor.spec)}," for tensor in tensors]
    return [f"{name} = {{", *lines, "}"] if lines else [f"{name} = {{}}"]


def pytree_code(plan: PlanModel, in_tree: Any) -> str:
    """Python that makes the PartitionSpecs of the arguments as a literal of their pytree.

    Args:
      in_tree: the pytree of the arguments.

    Raises:
      InputError: the pytree is not known, or has containers other than tuples, lists, dicts,
        namedtuples and None.
    """
    if in_tree is None:
        raise InputError(
            "the pytree of the arguments is not known from the plan's file",
            where=plan.program.name,
            do="Give what was planned (--target), or export specs, which works for any pytree",
        )
    imports: set[tuple[str, str]] = set()
    specs = iter([spec_code(tensor.spec) for tensor in plan.program.inputs])
    literal = _literal(in_tree, specs, imports, "")
    lines = [f"from {module} import {name}" for module, name in sorted(imports)]
    return "\n".join(
        [
            *_heading(plan),
            "from jax.sharding import PartitionSpec as P",
            *lines,
            "",
            f"IN_SPECS = {literal}",
            "",
        ]
    )


def _literal(tree: Any, specs: Any, imports: set[tuple[str, str]], indent: str) -> str:
    if jax.tree_util.treedef_is_leaf(tree) and tree.num_leaves == 1:
        return str(next(specs))
    kind: Any
    keys: Any
    kind, keys = tree.node_data() or (type(None), None)
    children = tree.children()
    inner = indent + "    "

    def lines(parts: Sequence[str], opening: str, closing: str) -> str:
        if not parts:
            return f"{opening}{closing}"
        body = "".join(f"{inner}{part},\n" for part in parts)
        return f"{opening}\n{body}{indent}{closing}"

    parts = [_literal(child, specs, imports, inner) for child in children]
    if kind is type(None):
        return "None"
    if kind is dict:
        return lines([f"{k!r}: {part}" for k, part in zip(keys, parts, strict=True)], "{", "}")
    if kind is list:
        return lines(parts, "[", "]")
    if kind is tuple:
        return lines(parts, "(", ")")
    if issubclass(kind, tuple) and hasattr(kind, "_fields") and "." not in kind.__qualname__:
        imports.add((kind.__module__, kind.__name__))
        named = [f"{name}={part}" for name, part in zip(kind._fields, parts, strict=True)]
        return lines(named, f"{kind.__name__}(", ")")
    raise InputError(
        f"the arguments hold a {kind.__qualname__}, which cannot be written as a literal",
        where="pytree",
        do="Export specs, whose specs_like(args, IN_SPECS) works for any pytree",
    )


def constraints_code(plan: PlanModel, *, everything: bool = False) -> str:
    """Lines of `with_sharding_constraint`, each under the source line that makes the value.

    Matrix products, convolutions, gathers and calls of the forward pass in the user's own files;
    the backward pass follows from them. Kernels of `sw.kernel`, of both passes, are told as
    `shard_map`s.

    Args:
      everything: every constraint of the plan that has a source line.
    """
    lines = _heading(plan)
    lines += [
        "# Inside `with jax.set_mesh(mesh):`, put each line behind the one that it names; x is",
        "# the value that is made there.",
        "import jax",
        "from jax.sharding import PartitionSpec as P",
    ]
    told: dict[tuple[str, str, str], None] = {}
    for constraint in plan.constraints:
        if constraint.site.kind == "result" and (everything or _is_main(constraint)):
            told[constraint.source, _what(constraint), _spec_of(constraint)] = None
    source = ""
    for place, what, spec in sorted(told, key=_order):
        if place != source:
            lines += ["", f"# {place}"]
            source = place
        lines.append(f"x = jax.lax.with_sharding_constraint(x, {spec})  # {what}")
    lines += _kernel_lines(plan)
    return "\n".join(lines) + "\n"


def _kernel_lines(plan: PlanModel) -> list[str]:
    """Every kernel, forward and backward, as the `shard_map` that it is under the plan."""
    told: dict[tuple[str, str, str], None] = {}
    for kernel in plan.kernels:
        ins = ", ".join(map(spec_code, kernel.in_specs))
        outs = ", ".join(map(spec_code, kernel.out_specs))
        if len(kernel.out_specs) > 1:
            outs = f"({outs})"
        added = f", results added up over {', '.join(kernel.summed)}" if kernel.summed else ""
        line = (
            f"kernel = jax.shard_map(kernel, in_specs=({ins},), out_specs={outs}, check_vma=False)"
        )
        told[kernel.source, f"{kernel.name}{added}", line] = None
    lines, source = [], ""
    for place, what, line in sorted(told, key=_order):
        if place != source:
            lines += ["", f"# {place}"]
            source = place
        lines.append(f"{line}  # {what}")
    return lines


def _is_main(constraint: ConstraintModel) -> bool:
    op = (constraint.site.op or "").rpartition(".")[2]
    location = constraint.site.location or ""
    own = bool(constraint.source) and not any(mark in constraint.source for mark in _FOREIGN)
    return op in _MAIN_OPS and own and not any(mark in location for mark in _BACKWARD)


def _what(constraint: ConstraintModel) -> str:
    """An operation as its author knows it: the einsum, or its name."""
    location = constraint.site.location or ""
    parts = [p for p in location.replace("(", "/").replace(")", "").split("/") if "->" in p]
    op = (constraint.site.op or "").rpartition(".")[2]
    return f"{op} {parts[-1]}" if parts else op


def _spec_of(constraint: ConstraintModel) -> str:
    spec: Spec = constraint.made
    return spec_code(spec)


def _order(key: tuple[str, str, str]) -> tuple[str, int, str, str]:
    source, what, spec = key
    file, _, line = source.rpartition(":")
    return file, int(line) if line.isdecimal() else 0, what, spec
