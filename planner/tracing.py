"""Lowering functions for planning and for running: the one way that both use."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import jax
from jax._src.config import traceback_in_locations_limit
from jax.sharding import AbstractMesh, AxisType, use_abstract_mesh

from shardwright.errors import InputError
from shardwright.planner.kernels import planned_calls
from shardwright.planner.prints import prints_for_planning

T = TypeVar("T")


def mesh_context(shape: Mapping[str, int]) -> AbstractContextManager[Any]:
    """A context in which functions may name the axes of a mesh that has no devices here."""
    names = tuple(shape)
    mesh = AbstractMesh(tuple(shape.values()), names, axis_types=(AxisType.Auto,) * len(names))
    return use_abstract_mesh(mesh)


def in_mesh(shape: Mapping[str, int] | None, make: Callable[[], T]) -> T:
    """What `make` returns where functions may name the axes of a mesh.

    A `shard_map` that was given a mesh of its own devices refuses any other around it, so such a
    function is called without.
    """
    if shape is None:
        return make()
    try:
        with mesh_context(shape):
            return make()
    except InputError as error:
        if "context mesh" not in error.what:
            raise
    return make()


def function_name(fn: Callable[..., Any]) -> str:
    """A readable name for a function, looking through partials."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__name__", type(fn).__name__)


def lower_for_planning(
    fn: Callable[..., Any],
    args: Sequence[Any],
    donate_argnums: Sequence[int],
    platform: str = "tpu",
    *,
    to_run: bool = False,
    **jit_options: Any,
) -> Any:
    """Lowers a function the one way that planning and executing both use.

    Args:
      to_run: prints and debugging callbacks are lowered as they run, not as they are planned.

    Unused arguments are kept, so that the arguments of main are the leaves of `args` in order.

    Raises:
      InputError: the function does not trace with these arguments.
    """

    # JAX keeps the module of a lowering, and annotations change it: a function of its own gets
    # a module of its own.
    def own(*own_args: Any) -> Any:
        return fn(*own_args)

    own.__name__ = function_name(fn)
    # The innermost line is the one that is told; the callers above it would make the same program
    # another one for each place that it is planned from.
    prints = nullcontext() if to_run else prints_for_planning(platform)
    with user_errors(fn), planned_calls(), traceback_in_locations_limit(1), prints:
        jitted = jax.jit(own, donate_argnums=tuple(donate_argnums), keep_unused=True, **jit_options)
        return jitted.trace(*args).lower(lowering_platforms=(platform,))


def traced_output(fn: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Shapes and types of what a function returns, in its pytree.

    Raises:
      InputError: the function does not trace with these arguments.
    """
    with user_errors(fn):
        return jax.eval_shape(fn, *args)


@contextmanager
def user_errors(fn: Callable[..., Any]) -> Iterator[None]:
    """Tells what goes wrong in tracing a function as an InputError."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # whatever the user's function raises
        reason = next((line for line in str(error).splitlines() if line.strip()), "")
        what = "the function does not trace with these arguments"
        do = (
            "Pass arrays or jax.ShapeDtypeStructs shaped like the real arguments, and bind "
            "static arguments with functools.partial"
        )
        if "different from the lowering platform" in reason:
            what = "the function calls back to Python, which cannot be lowered for another platform"
            do = (
                "Leave out callbacks that return something, and ordered prints; jax.debug.print "
                "without ordered=True may stay"
            )
        if "not found for platform" in reason:
            what = "the function has an operation that the platform has not"
            do = "Replace it, or compute what it makes before the step and pass that"
        raise InputError(
            f"{what}: {type(error).__name__}: {reason[:400]}", where=function_name(fn), do=do
        ) from error
