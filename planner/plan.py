"""Step 8: a plan that can be saved, read by people, and run."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.interpreters.mlir import dtype_to_ir_type
from jax.sharding import AxisType, Mesh, NamedSharding
from pydantic import ValidationError

from shardwright.errors import InputError
from shardwright.hardware_profiles.chip import parse_chip
from shardwright.hardware_profiles.mesh import LogicalMesh, order_devices
from shardwright.planner import mlir
from shardwright.planner.annotate import annotate, check_program
from shardwright.planner.constraints import ValueConstraint
from shardwright.planner.kernel_lowering import place_kernels
from shardwright.planner.kernel_shardings import KernelShardings
from shardwright.planner.kernels import planned_calls
from shardwright.planner.plan_data import (
    damage,
    dim_axes,
    op_key,
    partition_spec,
    tree_of,
    value_constraint,
)
from shardwright.planner.plan_schema import (
    SCHEMA_VERSION,
    EstimateModel,
    PlanModel,
    SolverModel,
    TensorModel,
)
from shardwright.planner.program import Program
from shardwright.planner.tracing import function_name, in_mesh, lower_for_planning, traced_output

if TYPE_CHECKING:
    from shardwright.planner.explain import Explanation

_PLAN_AGAIN = "Plan again with these arguments, or call with those that were planned"


class Plan:
    """The sharding of every tensor of a program on a slice, and what it costs.

    `data` is the whole plan as a pydantic model; the rest are views of it and ways to run it.
    """

    def __init__(
        self,
        data: PlanModel,
        in_tree: Any = None,
        out_tree: Any = None,
        program: Program | None = None,
    ) -> None:
        self.data = data
        self._program = program
        self._in_tree = in_tree or tree_of(data.program.in_tree)
        self._out_tree = out_tree or tree_of(data.program.out_tree)

    def __repr__(self) -> str:
        axes = ", ".join(f"{name}={size}" for name, size in self.mesh_axes.items())
        return (
            f"<Plan of {self.data.program.name} on {self.data.topology}, mesh {axes}: "
            f"{self.estimate.step_time_s:.3g} s a step, "
            f"{self.estimate.peak_memory_bytes / 1e9:.3g} of "
            f"{self.estimate.memory_capacity_bytes / 1e9:.3g} GB>"
        )

    # -- what the plan says --------------------------------------------------------------------

    @property
    def mesh_axes(self) -> dict[str, int]:
        """Mesh axis name -> size, major to minor."""
        return dict(self.data.mesh_axes)

    @property
    def estimate(self) -> EstimateModel:
        """Step time, memory and collectives as the cost models tell them."""
        return self.data.estimate

    @property
    def solver(self) -> SolverModel:
        """How good the plan is proven to be."""
        return self.data.solver

    @property
    def compiler_options(self) -> dict[str, str]:
        """Options that the TPU compiler is given."""
        return dict(self.data.compiler_options)

    @cached_property
    def logical_mesh(self) -> LogicalMesh:
        """The mesh as it is laid on the torus of the slice."""
        return LogicalMesh.from_json(self.data.mesh, parse_chip(self.data.chip))

    @property
    def in_tree(self) -> Any:
        """The pytree of the arguments; None where it is not known."""
        return self._in_tree

    @property
    def in_specs(self) -> Any:
        """A PartitionSpec for every argument, in the pytree of the arguments.

        A dict by path where the pytree is not known: for StableHLO, and for plans read from JSON
        whose arguments have containers that JAX cannot serialise.
        """
        return _as_tree(self.data.program.inputs, self._in_tree)

    @property
    def out_specs(self) -> Any:
        """A PartitionSpec for every result, in the pytree of the results."""
        return _as_tree(self.data.program.outputs, self._out_tree)

    @property
    def layout_rules(self) -> dict[str, tuple[str, ...]]:
        """Logical name -> the mesh axes that shard its dimensions, under a named layout.

        Raises:
          InputError: the plan was not asked for with `layout="named"`.
        """
        if self.data.layout is None:
            raise InputError(
                "the plan has no layout rules",
                where="layout_rules",
                do='Plan with layout="named"; of any plan, `shardwright export --format flax` '
                "makes the rules that say most of it",
            )
        return {rule.name: tuple(rule.axes) for rule in self.data.layout.rules}

    def explain(
        self,
        name: str,
        fn: Callable[..., Any] | Program | None = None,
        *args: Any,
        resolve: int = 3,
        time_limit_s: float = 4.0,
    ) -> Explanation:
        """Why a tensor is sharded as it is: its alternatives, and what each would cost.

        Args:
          name: the path of an argument ("[0]['params']['w1']"), its end in short ("params/w1"),
            or an operation's source line ("train.py:33", "train.py:33#2").
          fn, args: what was planned; not needed for a plan that was made in this process.
          resolve: how many alternatives are planned again around, besides being priced with the
            rest of the plan kept.
          time_limit_s: seconds for each of these.

        Raises:
          InputError: nothing has such a name, or another program is given, or none.
        """
        from shardwright.planner.explain import explain

        program = self._program
        if isinstance(fn, Program):
            program = fn
        elif fn is not None:
            donated = self.data.program.donate_argnums
            program = in_mesh(
                self.data.options.mesh, lambda: Program.trace(fn, *args, donate_argnums=donated)
            )
        if not isinstance(name, str):
            raise InputError(
                f"{name!r} names nothing",
                where="explain",
                do='Give a text: "params/w", "train.py:33"',
            )
        if program is None:
            raise InputError(
                "a plan from a file does not hold its program",
                where="explain",
                do="Pass the function and arguments that were planned, or a Program",
            )
        return explain(self, name, program, resolve=resolve, time_limit_s=time_limit_s)

    # -- files ---------------------------------------------------------------------------------

    def to_json(self) -> str:
        """The plan as JSON text."""
        return self.data.model_dump_json(indent=1)

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON.

        Raises:
          InputError: the file cannot be written.
        """
        try:
            Path(path).write_text(self.to_json() + "\n")
        except (OSError, TypeError) as error:
            raise InputError(
                f"the plan cannot be written: {error}",
                where=str(path),
                do="Give the path of a file that may be written",
            ) from None

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Reads a plan.

        Raises:
          InputError: there is no such file, or it is not a plan of this schema version.
        """
        try:
            text = Path(path).read_text()
        except (OSError, UnicodeDecodeError, TypeError) as error:
            raise InputError(
                f"the plan cannot be read: {error}", where=str(path), do="Give the path of a plan"
            ) from None
        return Plan.from_json(text, where=str(path))

    @staticmethod
    def from_json(text: str, where: str = "plan") -> Plan:
        """Reads a plan from JSON text.

        Raises:
          InputError: it is not JSON, not a plan, damaged, or of another schema version.
        """
        make_one = "Make one with `shardwright plan ... -o plan.json`"
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError, TypeError) as error:
            raise InputError(
                f"this is not whole JSON ({error})", where=where, do=make_one
            ) from None
        version = raw.get("schema_version") if isinstance(raw, dict) else None
        if version is None:
            raise InputError("this JSON is not a Shardwright plan", where=where, do=make_one)
        if version != SCHEMA_VERSION:
            raise InputError(
                f"the plan has schema version {version} and this Shardwright reads "
                f"{SCHEMA_VERSION}",
                where=where,
                do="Plan again with this version",
            )
        try:
            data = PlanModel.model_validate(raw)
        except ValidationError as error:
            first = error.errors()[0]
            wrong = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        else:
            wrong = damage(data)
        if wrong:
            raise InputError(f"the plan is damaged at {wrong}", where=where, do=make_one)
        return Plan(data)

    # -- running it ----------------------------------------------------------------------------

    def make_mesh(self, devices: Sequence[Any] | None = None) -> Mesh:
        """The mesh of real devices, laid on the torus as planned.

        Args:
          devices: TPU devices are placed by their coordinates; devices of other platforms (forced
            host devices, for tests) in the order given. Defaults to all devices of JAX.

        Raises:
          InputError: there are not as many devices as planned for.
        """
        if devices is not None and not (
            isinstance(devices, Iterable) and all(hasattr(d, "platform") for d in devices)
        ):
            raise InputError(
                f"{devices!r} is no list of devices", where="devices", do="Pass jax.devices()"
            )
        devices = list(jax.devices() if devices is None else devices)
        wanted = int(np.prod(list(self.mesh_axes.values())))
        if len(devices) != wanted:
            raise InputError(
                f"the plan is for {wanted} devices ({self.data.topology}) and there are "
                f"{len(devices)}",
                where="devices",
                do="Run on the planned slice, pass devices=, or plan for the slice you have",
            )
        shape = tuple(self.mesh_axes.values())
        if all(hasattr(d, "coords") for d in devices):
            array = order_devices(self.logical_mesh, devices)
        else:
            array = np.array(devices, dtype=object).reshape(shape)
        names = tuple(self.mesh_axes)
        return Mesh(array, names, axis_types=(AxisType.Auto,) * len(names))

    def lower(
        self, fn: Callable[..., Any], *args: Any, devices: Sequence[Any] | None = None
    ) -> jax.stages.Lowered:
        """Lowers a function with the plan's shardings on its arguments, results and inside.

        Raises:
          InputError: the function or the arguments are not those that were planned.
        """
        mesh = self.make_mesh(devices)
        self._check_arguments(args)
        args = jax.tree.map(abstract, args)
        platform = mesh.devices.flat[0].platform
        in_specs = [partition_spec(t.spec) for t in self.data.program.inputs]
        out_specs = [partition_spec(t.spec) for t in self.data.program.outputs]
        in_tree: Any = jax.tree.structure(args)
        donated = self.data.program.donate_argnums
        out_tree: Any = jax.tree.structure(in_mesh(self.mesh_axes, lambda: traced_output(fn, args)))
        if out_tree.num_leaves != len(out_specs):
            raise InputError(
                f"the function returns {out_tree.num_leaves} arrays and the planned one returned "
                f"{len(out_specs)}",
                where=function_name(fn),
                do=_PLAN_AGAIN,
            )
        planned_platform = self.data.versions.platform

        def lower(on: str, **options: Any) -> jax.stages.Lowered:
            lowered: jax.stages.Lowered = in_mesh(
                self.mesh_axes, lambda: lower_for_planning(fn, args, donated, on, **options)
            )
            return lowered

        if platform != planned_platform:
            self._check_program(lower(planned_platform))
        with planned_calls() as calls:
            lowered = lower(
                platform,
                to_run=True,
                in_shardings=in_tree.unflatten([NamedSharding(mesh, s) for s in in_specs]),
                out_shardings=out_tree.unflatten([NamedSharding(mesh, s) for s in out_specs]),
            )
        module: Any = lowered.compiler_ir("stablehlo")
        with module.context:
            mlir.normalize(module)
            annotate(
                module,
                self.mesh_axes,
                self.constraints(),
                same_platform=platform == planned_platform,
            )
            place_kernels(module, calls, self.kernels(), self.mesh_axes, platform)
        return lowered

    def compile(
        self, fn: Callable[..., Any], *args: Any, devices: Sequence[Any] | None = None
    ) -> jax.stages.Compiled:
        """Compiles a function under the plan, with the plan's compiler options on TPU."""
        lowered = self.lower(fn, *args, devices=devices)
        mesh = self.make_mesh(devices)
        if mesh.devices.flat[0].platform == "tpu" and self.compiler_options:
            return lowered.compile(compiler_options=dict(self.compiler_options))
        return lowered.compile()

    def jit(
        self, fn: Callable[..., Any], devices: Sequence[Any] | None = None
    ) -> Callable[..., Any]:
        """A function that places its arguments as planned and runs; compiled at its first call."""
        return _PlannedFunction(self, fn, devices)

    def constraints(self) -> tuple[ValueConstraint, ...]:
        """The constraints that the plan puts inside the program."""
        return tuple(value_constraint(c) for c in self.data.constraints)

    def kernels(self) -> tuple[KernelShardings, ...]:
        """How the calls of kernels are sharded."""
        return tuple(
            KernelShardings(
                name=k.name,
                key=op_key(k.site),
                operands=tuple(map(dim_axes, k.in_specs)),
                results=tuple(map(dim_axes, k.out_specs)),
                summed=tuple(k.summed),
                source=k.source,
            )
            for k in self.data.kernels
        )

    def _check_program(self, lowered: Any) -> None:
        """Raises InputError where a program lowered for the planned platform is another one."""
        module = lowered.compiler_ir("stablehlo")
        with module.context:
            mlir.normalize(module)
            check_program(module, self.constraints())

    def _check_arguments(self, args: Sequence[Any]) -> None:
        leaves = jax.tree_util.tree_leaves_with_path(tuple(args))
        planned = self.data.program.inputs
        if len(leaves) != len(planned):
            raise InputError(
                f"{len(leaves)} arrays are given and {len(planned)} were planned",
                where="arguments",
                do=_PLAN_AGAIN,
            )
        for (path, leaf), tensor in zip(leaves, planned, strict=True):
            shape, dtype = tensor_type(leaf)
            if shape != tuple(tensor.shape) or dtype != tensor.dtype:
                raise InputError(
                    f"{dtype}{list(shape)} is given and {tensor.dtype}{tensor.shape} was planned",
                    where=f"argument {jax.tree_util.keystr(path)}",
                    do=_PLAN_AGAIN,
                )


class _PlannedFunction:
    """Compiles at the first call and keeps the executable."""

    def __init__(self, plan: Plan, fn: Callable[..., Any], devices: Sequence[Any] | None) -> None:
        self._plan = plan
        self._fn = fn
        self._mesh = plan.make_mesh(devices)
        self._devices = devices
        self._compiled: Any = None

    def __call__(self, *args: Any) -> Any:
        if self._compiled is None:
            self._compiled = self._plan.compile(self._fn, *args, devices=self._devices)
            specs = [partition_spec(t.spec) for t in self._plan.data.program.inputs]
            self._shardings = [NamedSharding(self._mesh, spec) for spec in specs]
        else:
            self._plan._check_arguments(args)
        leaves = jax.tree.leaves(args)
        tree: Any = jax.tree.structure(args)
        placed = tree.unflatten(jax.device_put(leaves, self._shardings))
        try:
            return self._compiled(*placed)
        except ValueError as error:
            if "input layouts that disagree" not in str(error):
                raise
            told = next((line for line in str(error).splitlines() if "Argument" in line), "")
            raise InputError(
                f"JAX does not take the layout of an array: {told.strip(' :')}",
                where="arguments",
                do="Pass arrays of the default layout. On CPU compiled programs take none of less "
                "than a byte an element: pass int8 and cast it inside",
            ) from error


def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    """The shape and type of an argument, whatever device it is on."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    aval = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def tensor_type(leaf: Any) -> tuple[tuple[int, ...], str]:
    """Shape and StableHLO element type of an argument as the program sees it.

    Raises:
      InputError: it is no array.
    """
    try:
        wanted = abstract(leaf)
    except TypeError:
        raise InputError(
            f"{leaf!r} is no array",
            where="arguments",
            do="Pass arrays or jax.ShapeDtypeStructs, and bind the rest with functools.partial",
        ) from None
    if jnp.issubdtype(wanted.dtype, jax.dtypes.prng_key):
        data = jax.eval_shape(jax.random.key_data, wanted)
        return tuple(data.shape), mlir_dtype(data.dtype)
    return tuple(wanted.shape), mlir_dtype(wanted.dtype)


@functools.cache
def mlir_dtype(dtype: Any) -> str:
    """StableHLO's name of a dtype ("f32", "bf16", "ui8")."""
    with mlir.new_context():
        return str(dtype_to_ir_type(np.dtype(dtype)))


def _as_tree(tensors: Sequence[TensorModel], tree: Any) -> Any:
    specs = [partition_spec(t.spec) for t in tensors]
    if tree is None:
        return {t.path: spec for t, spec in zip(tensors, specs, strict=True)}
    return tree.unflatten(specs)
