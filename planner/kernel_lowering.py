"""Kernels under a plan: every custom call that stands for one becomes a `shard_map` of it.

The calls are replaced in the module, after JAX has lowered it and its functions are inlined: what
JAX lowers once (a function called for every layer, say) may be planned differently at each call.
JAX itself lowers each `shard_map`, alone, from where its operations are moved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec, use_abstract_mesh
from jaxlib.mlir.dialects import stablehlo

from shardwright.errors import InputError
from shardwright.planner import mlir
from shardwright.planner.collectives import DimAxes
from shardwright.planner.given import MANUAL
from shardwright.planner.graph_reader import operation_keys
from shardwright.planner.kernel_ops import KernelInfo, is_registered, read_kernel, target_of
from shardwright.planner.kernel_shardings import KernelShardings
from shardwright.planner.kernels import CALL_ATTRIBUTE, KernelCall
from shardwright.planner.mlir import ir, sdy
from shardwright.planner.registered_ops import registered_call


def place_kernels(
    module: Any,
    calls: Sequence[KernelCall],
    planned: Sequence[KernelShardings] | None,
    mesh_shape: Mapping[str, int],
    platform: str,
    *,
    keep_unknown: bool = False,
) -> None:
    """Replaces the kernel calls of a normalised, annotated module, in place.

    Args:
      calls: the calls of the lowering that made the module, by number.
      planned: how each is to be sharded; calls inside a `shard_map` of the user need nothing.
        Where None, the module is for one device.
      mesh_shape: mesh axis name -> size, as the module has it.
      platform: of the devices.
      keep_unknown: leave calls whose functions are not here.

    Raises:
      InputError: a call was not planned, its function is not here, or it cannot be lowered for its
        shards.
    """
    found = [(key, op, read_kernel(op)) for key, op in operation_keys(module).items()]
    by_key = {shardings.key: shardings for shardings in planned or ()}
    bodies = _Bodies(mesh_shape, platform)
    channels = _free_channels(module)
    for key, op, info in found:
        if info is None or (keep_unknown and not calls and not is_registered(op)):
            continue
        inside = planned is None or _inside_manual(op)
        shardings = None if inside else by_key.get(key)
        if shardings is None and is_registered(op):
            continue  # it is on local arrays already, or was not known to the planner
        if not inside and (shardings is None or not _fits(shardings, op)):
            raise InputError(
                f"the plan has no shardings for kernel {info.name} number {key.ordinal} at "
                f"{key.location!r}",
                where="kernels",
                do="Plan this program again: it is not the one that was planned",
            )
        call = _call(op, calls, info)
        mesh_name = "" if shardings is None else _mesh_name(module, mesh_shape)
        _replace(op, bodies.text(call, info, shardings), mesh_name, channels)


def _call(op: Any, calls: Sequence[KernelCall], info: KernelInfo) -> KernelCall:
    if is_registered(op):
        return registered_call(op, info)
    number = int(ir.IntegerAttr(op.attributes[CALL_ATTRIBUTE]).value)
    if number >= len(calls):
        raise InputError(
            f"the program came from a file, which does not hold the function of kernel {info.name}",
            where="kernels",
            do="Give the function that was planned instead of the file",
        )
    return calls[number]


class _Bodies:
    """Kernels as JAX lowers them for one mesh; equal calls are lowered once."""

    def __init__(self, mesh_shape: Mapping[str, int], platform: str) -> None:
        sizes, names = tuple(mesh_shape.values()), tuple(mesh_shape)
        self._mesh = AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))
        self._platform = platform
        self._known: dict[Any, str] = {}

    def text(self, call: KernelCall, info: KernelInfo, shardings: KernelShardings | None) -> str:
        """A module whose main is the kernel: on shards of its arguments, or on them as they are."""
        told = None if shardings is None else (shardings.operands, shardings.results)
        key = (call.kernel, call.in_tree, call.operands, told)
        if key not in self._known:
            self._known[key] = self._lower(call, info, shardings)
        return self._known[key]

    def _lower(self, call: KernelCall, info: KernelInfo, shardings: KernelShardings | None) -> str:
        on_tpu = self._platform == "tpu"
        function: Any = call.kernel.flat(call.in_tree, on_tpu)
        if shardings is not None:
            function = jax.shard_map(
                _summing(function, shardings.summed),
                mesh=self._mesh,
                in_specs=tuple(map(_spec, shardings.operands)),
                out_specs=[_spec(s) for s in shardings.results],
                check_vma=False,
            )
        try:
            # Whatever mesh the caller has set, the kernel is on the plan's.
            with use_abstract_mesh(self._mesh):
                traced = jax.jit(function).trace(*call.operands)
                lowered = traced.lower(lowering_platforms=(self._platform,))
            module: Any = lowered.compiler_ir("stablehlo")
        except Exception as error:  # whatever the kernel raises for shapes that it cannot do
            reason = next((line for line in str(error).splitlines() if line.strip()), "")
            local = "" if shardings is None else f" sharded as {_told(shardings)}"
            raise InputError(
                f"the kernel cannot be lowered{local}: {type(error).__name__}: {reason[:300]}",
                where=f"kernel {info.name}",
                do="Name the factors that must not be cut in whole=, or give it a reference",
            ) from error
        with module.context:
            mlir.normalize(module)
            text: str = module.operation.get_asm(enable_debug_info=True)
        return text


def _summing(function: Any, axes: Sequence[str]) -> Any:
    """The function with its results added up over mesh axes."""
    if not axes:
        return function

    def summed(*leaves: Any) -> Any:
        return jax.lax.psum(function(*leaves), tuple(axes))

    return summed


def _spec(sharding: DimAxes) -> PartitionSpec:
    return PartitionSpec(*(tuple(axis.name for axis in dim) or None for dim in sharding))


def _told(shardings: KernelShardings) -> str:
    return ", ".join(str(tuple(_spec(s))) for s in (*shardings.operands, *shardings.results))


def _fits(shardings: KernelShardings, op: Any) -> bool:
    told = (*shardings.operands, *shardings.results)
    values = (*op.operands, *op.results)
    return [len(s) for s in told] == [v.type.rank for v in values]


def _inside_manual(op: Any) -> bool:
    holder = op.parent
    while holder is not None:
        if holder.operation.name == MANUAL:
            return True
        holder = holder.operation.parent
    return False


def _mesh_name(module: Any, shape: Mapping[str, int]) -> str:
    """The symbol of the module's mesh with these axes."""
    for op in module.body.operations:
        if op.operation.name == "sdy.mesh":
            axes = map(sdy.MeshAxisAttr, sdy.MeshAttr(op.operation.attributes["mesh"]).axes)
            if [(a.name, a.size) for a in axes] == list(shape.items()):
                return mlir.symbol_name(op)
    raise AssertionError("an annotated module has the mesh of its plan")


def _replace(op: Any, text: str, mesh_name: str, channels: Iterator[int]) -> None:
    """Moves the operations of a module's main to where a call is."""
    body = ir.Module.parse(text)
    block = mlir.entry_block(mlir.main_function(body))
    *inner, last = [o.operation for o in block.operations]
    names = [mlir.symbol_name(o) for o in body.body.operations if o.operation.name == "sdy.mesh"]
    given = op.attributes if is_registered(op) else ()
    attributes = {name: op.attributes[name] for name in given}
    for argument, operand in zip(block.arguments, op.operands, strict=True):
        argument.replace_all_uses_with(operand)
    for moved in inner:
        moved.move_before(op)
        for part in _with_regions(moved):
            _rename_mesh(part, names, mesh_name)
            if attributes and target_of(part) == target_of(op):
                for name, attribute in attributes.items():
                    part.attributes[name] = attribute
            if "channel_handle" in part.attributes:
                _set_channel(part, next(channels))
    for result, value in zip(op.results, last.operands, strict=True):
        result.replace_all_uses_with(value)
    op.erase()
    last.erase()


def _with_regions(op: Any) -> Iterator[Any]:
    yield op
    for region in op.regions:
        for block in region.blocks:
            for inner in mlir.walk_block(block):
                yield from _with_regions(inner)


def _rename_mesh(op: Any, names: Sequence[str], wanted: str) -> None:
    for kind in ("in_shardings", "out_shardings", "sharding", "sdy.sharding"):
        if kind in op.attributes:
            told = str(op.attributes[kind])
            for name in names:
                told = told.replace(f"@{name},", f"@{wanted},")
            op.attributes[kind] = ir.Attribute.parse(told)


def _free_channels(module: Any) -> Iterator[int]:
    """Channel numbers that a module does not use; it is looked through when one is asked for."""
    used = [0]
    for op in module.body.operations:
        for part in _with_regions(op.operation):
            if "channel_handle" in part.attributes:
                used.append(stablehlo.ChannelHandle(part.attributes["channel_handle"]).handle)
    yield from count(max(used) + 1)


def _set_channel(op: Any, number: int) -> None:
    kind = stablehlo.ChannelHandle(op.attributes["channel_handle"]).channel_type
    op.attributes["channel_handle"] = stablehlo.ChannelHandle.get(number, kind)
