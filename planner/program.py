"""Step 1: a program, from a JAX function, a jax.export artifact or StableHLO.

One form inside: an MLIR module whose calls are inlined, with the names of its inputs and outputs
and which outputs take over the buffers of which inputs.
"""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import export as jax_export
from jaxlib.mlir.dialects import stablehlo

from shardwright.cost_models.memory import dtype_bytes
from shardwright.errors import InputError
from shardwright.planner import mlir
from shardwright.planner.given import program_mesh
from shardwright.planner.kernels import KernelCall, planned_calls
from shardwright.planner.mlir import ir
from shardwright.planner.program_file import ProgramNames, take_names, write_names
from shardwright.planner.tracing import function_name, lower_for_planning, user_errors

_MOST_ELEMENTS = 10**17
"""Far more than the largest slices hold (2e15 bytes); padded bytes of as many fit in an int64."""
_EXPORT_HELP = "Pass the bytes that jax.export's Exported.serialize() returned"


@dataclass(frozen=True)
class Tensor:
    """One input or output of a program.

    Attributes:
      path: in the pytree.
      dtype: its StableHLO element type.
      inner_dims: dimensions at the end of the shape that no sharding can name: those of the data
        of a random key, which is one element to JAX.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    inner_dims: int = 0


@dataclass(frozen=True)
class Program:
    """A program to plan.

    Attributes:
      name: what the user would call it (the function's name or the module's).
      bytecode: MLIR bytecode of the module, calls inlined, with locations.
      inputs: the arguments of main in order.
      outputs: the results of main in order.
      aliases: output index -> input index whose buffer it takes over (donated state).
      donate_argnums: the positional arguments of the function that are donated.
      in_tree: the pytree of the arguments, or None where the input had none.
      out_tree: the pytree of the result, or None.
      mesh_axes: the mesh that shardings inside the program name, or None.
      fingerprint: SHA-256 of the module without locations; equal programs have equal ones.
      kernel_calls: the calls of `sw.kernel` in it, with their functions; none from a file.
    """

    name: str
    bytecode: bytes = field(repr=False)
    inputs: tuple[Tensor, ...] = field(repr=False)
    outputs: tuple[Tensor, ...] = field(repr=False)
    aliases: dict[int, int] = field(repr=False)
    in_tree: Any = field(repr=False)
    out_tree: Any = field(repr=False)
    mesh_axes: dict[str, int] | None
    fingerprint: str
    donate_argnums: tuple[int, ...] = ()
    kernel_calls: tuple[KernelCall, ...] = field(default=(), repr=False, compare=False)

    @contextmanager
    def module(self) -> Iterator[Any]:
        """A fresh copy of the module, in a context of its own that is current inside `with`."""
        with mlir.new_context():
            yield ir.Module.parse(self.bytecode)

    def to_stablehlo(self) -> bytes:
        """The program as StableHLO (MLIR bytecode), which `from_stablehlo` reads as it is here.

        Unlike a jax.export artifact, for which JAX folds constants and rewrites operations, it
        keeps every operation and its location, so that a plan of it runs the function that was
        traced. Pytrees are not kept. It is read by the versions of jaxlib near the one here.
        """
        names = ProgramNames(
            name=self.name,
            in_paths=[tensor.path for tensor in self.inputs],
            out_paths=[tensor.path for tensor in self.outputs],
            donate_argnums=list(self.donate_argnums),
            in_inner_dims={t.path: t.inner_dims for t in self.inputs if t.inner_dims},
            out_inner_dims={t.path: t.inner_dims for t in self.outputs if t.inner_dims},
        )
        with self.module() as module:
            return write_names(module, names)

    @staticmethod
    def trace(
        fn: Callable[..., Any], *args: Any, donate_argnums: int | Sequence[int] = ()
    ) -> Program:
        """Traces a function for TPU; nothing is computed and no array is allocated.

        Args:
          fn: a function of arrays; state that it returns updated should be donated.
          args: arrays or `jax.ShapeDtypeStruct`s, in any pytrees.
          donate_argnums: positional arguments whose buffers the outputs take over, besides those
            that a function from `jax.jit` donates by itself.

        Raises:
          InputError: the function does not trace with these arguments.
        """
        donated = _donated(fn, args, donate_argnums)
        with planned_calls() as calls:
            lowered = lower_for_planning(fn, args, donated)
        return _from_module(
            lowered.compiler_ir("stablehlo").operation.get_asm(enable_debug_info=True),
            name=function_name(fn),
            in_paths=_paths(args),
            out_paths=_paths(lowered.out_info),
            in_inner_dims=_inner_dims(args),
            out_inner_dims=_inner_dims(lowered.out_info),
            in_tree=jax.tree.structure(args),
            out_tree=jax.tree.structure(lowered.out_info),
            donate_argnums=donated,
            kernel_calls=tuple(calls),
        )

    @staticmethod
    def from_exported(data: bytes) -> Program:
        """Reads a serialised `jax.export.Exported`.

        Raises:
          InputError: the bytes are truncated, foreign, shape-polymorphic or multi-platform.
        """
        try:
            exported = jax_export.deserialize(bytearray(data))
            artifact = exported.mlir_module_serialized
        except Exception as error:  # flatbuffers and jax raise many types for broken bytes
            raise InputError(
                f"these bytes are not a jax.export artifact that this jax reads "
                f"({str(error).splitlines()[0][:200] if str(error) else type(error).__name__})",
                where="exported program",
                do=_EXPORT_HELP,
            ) from None
        if len(exported.platforms) != 1:
            raise InputError(
                f"the artifact was exported for {', '.join(exported.platforms)}",
                where="exported program",
                do='Export it for one platform: jax.export.export(fn, platforms=["tpu"])',
            )
        kept = exported.module_kept_var_idx
        placeholders = [
            jax.ShapeDtypeStruct(aval.shape, aval.dtype)
            if all(isinstance(d, int) for d in aval.shape)
            else None
            for aval in exported.in_avals
        ]
        if any(p is None for p in placeholders):
            raise InputError(
                "the artifact has symbolic shapes, and a plan is for one size",
                where="exported program",
                do="Export it with concrete shapes",
            )
        args, _ = jax.tree.unflatten(exported.in_tree, placeholders)
        results = jax.tree.unflatten(exported.out_tree, list(exported.out_avals))
        paths = _paths(args)
        return _from_module(
            bytes(artifact),
            name=exported.fun_name,
            in_paths=[paths[i] for i in kept],
            out_paths=_paths(results),
            in_inner_dims=_inner_dims(args),
            out_inner_dims=_inner_dims(results),
            in_tree=jax.tree.structure(args) if len(kept) == len(paths) else None,
            out_tree=exported.out_tree,
        )

    @staticmethod
    def from_stablehlo(text_or_bytes: str | bytes) -> Program:
        """Reads a StableHLO module: text, MLIR bytecode, or a portable artifact.

        Inputs and outputs are numbered, unless `to_stablehlo` wrote the module.

        Raises:
          InputError: it does not parse, has no main, or has dynamic shapes.
        """
        return _from_module(text_or_bytes, name="", in_paths=None, out_paths=None)


def _donated(
    fn: Callable[..., Any], args: Sequence[Any], asked: int | Sequence[int]
) -> tuple[int, ...]:
    """The arguments that are donated, by the caller or by a function that is jitted already."""
    donated = {asked} if isinstance(asked, int) else set(asked)
    for number in donated:
        if not 0 <= number < len(args):
            raise InputError(
                f"argument {number} is to be donated and there are {len(args)}",
                where=function_name(fn),
                do="Give positions of arguments, counted from 0",
            )
    if isinstance(fn, jax.stages.Wrapped):
        with user_errors(fn):
            info, _ = fn.trace(*args).args_info
        leaves = (jax.tree.leaves(arg, is_leaf=lambda x: hasattr(x, "donated")) for arg in info)
        donated.update(i for i, arg in enumerate(leaves) if any(leaf.donated for leaf in arg))
    return tuple(sorted(donated))


def _paths(tree: Any) -> list[str]:
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def _inner_dims(tree: Any) -> dict[str, int]:
    """Path of each random key of a tree -> dimensions of the data of one."""
    return {
        jax.tree_util.keystr(path): jax.eval_shape(jax.random.key_data, leaf).ndim - leaf.ndim
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    }


def _from_module(
    source: str | bytes,
    *,
    name: str,
    in_paths: list[str] | None,
    out_paths: list[str] | None,
    in_inner_dims: Mapping[str, int] | None = None,
    out_inner_dims: Mapping[str, int] | None = None,
    in_tree: Any = None,
    out_tree: Any = None,
    donate_argnums: tuple[int, ...] = (),
    kernel_calls: tuple[KernelCall, ...] = (),
) -> Program:
    where = name or "program"
    with mlir.new_context() as context:
        module = _parse(context, source, where)
        main = mlir.main_function(module)
        mlir.normalize(module)
        names = take_names(module, where)
        if names is not None and in_paths is None:
            name, in_paths, out_paths = names.name, names.in_paths, names.out_paths
            donate_argnums = tuple(names.donate_argnums)
            in_inner_dims, out_inner_dims = names.in_inner_dims, names.out_inner_dims
        arguments = list(mlir.entry_block(main).arguments)
        results = list(mlir.last_operation(mlir.entry_block(main)).operands)
        inputs = _tensors(arguments, in_paths, in_inner_dims or {}, "arg", where)
        _check_shapes(mlir.entry_block(main), where)
        outputs = _tensors(results, out_paths, out_inner_dims or {}, "result", where)
        aliases = _aliases(main, inputs, outputs)
        asm = module.operation.get_asm(enable_debug_info=False)
        bytecode = io.BytesIO()
        module.operation.write_bytecode(bytecode)
        return Program(
            name=name or _module_name(module.operation.attributes),
            bytecode=bytecode.getvalue(),
            inputs=inputs,
            outputs=outputs,
            aliases=aliases,
            in_tree=in_tree,
            out_tree=out_tree,
            mesh_axes=program_mesh(module),
            fingerprint=hashlib.sha256(asm.encode()).hexdigest(),
            donate_argnums=donate_argnums,
            kernel_calls=kernel_calls,
        )


def _parse(context: Any, source: str | bytes, where: str) -> Any:
    if isinstance(source, bytes) and source[:4] == b"ML\xefR":
        try:
            return stablehlo.deserialize_portable_artifact(context, source)
        except Exception:  # not versioned StableHLO: plain bytecode, which parse reads or refuses
            return mlir.parse_module(source, where)
    if isinstance(source, bytes):
        try:
            source = source.decode()
        except UnicodeDecodeError:
            raise InputError(
                "these bytes are neither MLIR bytecode nor text", where=where, do=_EXPORT_HELP
            ) from None
    return mlir.parse_module(source, where)


def _module_name(attributes: Any) -> str:
    return str(ir.StringAttr(attributes["sym_name"]).value) if "sym_name" in attributes else "main"


def _tensors(
    values: list[Any],
    paths: list[str] | None,
    inner_dims: Mapping[str, int],
    kind: str,
    where: str,
) -> tuple[Tensor, ...]:
    if paths is None:
        paths = [f"{kind}{i}" for i in range(len(values))]
    tensors = []
    for path, value in zip(paths, values, strict=True):
        type_ = value.type
        if not isinstance(type_, ir.RankedTensorType) or not type_.has_static_shape:
            raise InputError(
                f"{path} has type {type_}, and only tensors of known shape can be planned",
                where=where,
                do="Lower the program with concrete shapes",
            )
        _check_size(type_, path if kind == "result" else f"argument {path}", where)
        inner = min(inner_dims.get(path, 0), len(type_.shape))
        tensors.append(Tensor(path, tuple(type_.shape), str(type_.element_type), inner))
    return tuple(tensors)


def _check_shapes(block: Any, where: str) -> None:
    for op in mlir.walk_block(block):
        for result in op.results:
            type_ = result.type
            if not isinstance(type_, ir.RankedTensorType):
                continue
            if not type_.has_static_shape:
                raise InputError(
                    f"{op.name} makes a {type_}, and only tensors of known shape can be planned",
                    where=mlir.source_line(op.location) or where,
                    do="Lower the program with concrete shapes",
                )
            _check_size(type_, f"the {type_} that {op.name} makes", where)
        for region in op.regions:
            for inner in region.blocks:
                _check_shapes(inner, where)


def _check_size(type_: Any, what: str, where: str) -> None:
    """Refuses a tensor whose bytes would not be counted exactly."""
    elements = math.prod(type_.shape)
    if elements > _MOST_ELEMENTS:
        nbytes = elements * dtype_bytes(str(type_.element_type))
        raise InputError(
            f"{what} has {nbytes:.3g} bytes, more than any slice could hold or work through",
            where=where,
            do=f"Give it smaller dimensions, of at most {_MOST_ELEMENTS:.0e} elements in all",
        )


def _aliases(main: Any, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> dict[int, int]:
    if "arg_attrs" not in main.attributes:
        return {}
    aliases: dict[int, int] = {}
    donors = []
    for i, attrs in enumerate(main.attributes["arg_attrs"]):
        attributes = ir.DictAttr(attrs)
        if "tf.aliasing_output" in attributes:
            aliases[ir.IntegerAttr(attributes["tf.aliasing_output"]).value] = i
        elif "jax.buffer_donor" in attributes:
            donors.append(i)
    # A donor without a named output gives its buffer to the first free output of its type.
    for donor in donors:
        for o, tensor in enumerate(outputs):
            same = (tensor.shape, tensor.dtype) == (inputs[donor].shape, inputs[donor].dtype)
            if same and o not in aliases:
                aliases[o] = donor
                break
    return aliases
