"""What the command line is given to plan, and where it writes."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shardwright.errors import InputError

if TYPE_CHECKING:
    from shardwright.planner.program import Program

_FUNCTION_HELP = "Write it as my_package.train:step; the current directory is searched too"
_FILE_SUFFIXES = (".bin", ".mlir", ".mlirbc", ".bc", ".stablehlo", ".txt", ".json", ".exported")


@dataclass(frozen=True)
class Target:
    """What to plan.

    Attributes:
      program: a function of `args`, or a program.
      args: of the function.
      donate: positions of the arguments whose buffers the results take over.
      name: as people know it.
      model_flops: FLOPs of one step that count for MFU, where a reference model tells them.
      tokens_per_step: of a reference model, or as many of its unit.
      unit: what a step works on.
      options: of a reference model.
      arguments: "module:name" of a function's arguments.
      model: the preset or kind that a reference model is built from, with `options`.
    """

    program: Callable[..., Any] | Program
    args: tuple[Any, ...]
    donate: tuple[int, ...]
    name: str
    model_flops: float | None = None
    tokens_per_step: int | None = None
    unit: Literal["tokens", "images", "examples"] = "tokens"
    options: Mapping[str, Any] = field(default_factory=dict)
    arguments: str | None = None
    model: str | None = None


def load_target(
    target: str, args: str | None, donate: Sequence[int], options: Mapping[str, Any]
) -> Target:
    """Finds out what a target is and loads it.

    Args:
      target: the name of a reference model, the path of a file that describes a model (TOML or
        YAML), "module:function", or the path of a file that holds a jax.export artifact or
        StableHLO; a path with a directory is always a file.
      args: "module:name" of the function's arguments.
      donate: positions of the arguments that the function's results take over.
      options: of a reference model.

    Raises:
      InputError: there is no such model, function or file, or it is given what it cannot take.
    """
    from shardwright.models import build, known_models, model_names

    base, name, options = resolve(target, options)
    if base in known_models():
        _refuse("a reference model", {"--args": args and [args], "--donate": donate})
        model = build(base, **options)
        return Target(
            model.step,
            model.example_args,
            model.donate_argnums,
            name,
            float(model.model_flops_per_step),
            model.tokens_per_step,
            model.options.unit,
            dict(options),
            model=base,
        )
    given_options = [f"{key}={value}" for key, value in options.items()]
    path = Path(target)
    if path.is_file() and path.suffix == ".py":
        raise _python_file(target)
    if path.is_file():
        _refuse(
            "a file",
            {"--args": args and [args], "--donate": donate, "model options": given_options},
        )
        return Target(load_program(path), (), (), path.name)
    if ":" in target:
        _refuse("a function", {"model options": given_options})
        function = _function(target)
        if args is None:
            raise InputError(
                "the function's arguments are not given",
                where=target,
                do="Add --args my_package.train:example_args, a tuple of arrays or "
                "jax.ShapeDtypeStructs or a function that returns it",
            )
        return Target(function, load_arguments(args), tuple(donate), target, arguments=args)
    if os.sep in target or path.suffix in _FILE_SUFFIXES or path.exists():
        reason = "this is a directory" if path.is_dir() else "there is no such file"
        raise InputError(
            reason, where=target, do="Give the path of a jax.export artifact or of StableHLO"
        )
    near = get_close_matches(target, model_names(), n=1)
    raise InputError(
        "this is neither a reference model, nor module:function, nor a file",
        where=target,
        do=(f"Did you mean {near[0]}? " if near else "")
        + f"The models are {', '.join(model_names())}",
    )


def resolve(target: str, options: Mapping[str, Any]) -> tuple[str, str, Mapping[str, Any]]:
    """The preset or kind of a file that describes a model, its name, and all its options.

    What is not the path of such a file is returned as it is, its own name.

    Raises:
      InputError: the file cannot be read, or describes no model.
    """
    from shardwright.models.config import configured, is_config, read_config

    if not is_config(target):
        return target, target, options
    config = read_config(target)
    return config.base, config.name, configured(config, options)


def where_to_plan(
    target: str | None, topology: str | None, mesh: dict[str, int] | None
) -> tuple[str, dict[str, int] | None]:
    """The slice and the mesh, from a file that describes a model where the command line has none.

    Raises:
      InputError: neither names a slice, or the file cannot be read.
    """
    from shardwright.models.config import is_config, read_config

    if target is not None and is_config(target):
        section = read_config(target).plan
        topology, mesh = topology or section.topology, mesh or section.mesh
    if topology is None:
        raise InputError(
            "no slice is given",
            where="command line",
            do="Add --topology v5e:16x16, or `topology` to [plan] of a model's file; `shardwright "
            "hardware` lists slices",
        )
    return topology, mesh


def _refuse(kind: str, given: Mapping[str, Sequence[Any] | None]) -> None:
    for name, value in given.items():
        if value:
            shown = ", ".join(map(str, value))
            raise InputError(
                f"{kind} takes no {name} ({shown})", where="command line", do="Leave it out"
            )


def load_program(path: Path) -> Program:
    """Reads a program from a file; what it is follows from its bytes.

    Raises:
      InputError: it cannot be read, or is neither a jax.export artifact nor StableHLO.
    """
    from shardwright.planner.program_bytes import read_program

    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(
            f"the file cannot be read ({error.strerror})", where=str(path), do="Check its path"
        ) from None
    return read_program(data, where=str(path))


def _function(reference: str) -> Callable[..., Any]:
    found = _imported(reference)
    if not callable(found):
        raise InputError(
            f"this is a {type(found).__name__}, not a function", where=reference, do=_FUNCTION_HELP
        )
    return found  # type: ignore[no-any-return]


def load_made(reference: str, what: str) -> Any:
    """What "module:name" is, or returns where it is a function.

    Args:
      what: what it should return, for errors.

    Raises:
      InputError: there is no such thing, or the function raises.
    """
    found = _imported(reference)
    if not callable(found):
        return found
    try:
        return found()
    except Exception as error:  # whatever the user's function raises
        raise InputError(
            f"it raised {type(error).__name__}: {_first_line(error)}",
            where=reference,
            do=f"Give a function of no arguments that returns {what}",
        ) from error


def load_arguments(reference: str) -> tuple[Any, ...]:
    """The arguments of a step that "module:name" is or returns.

    Raises:
      InputError: it is no tuple and returns none.
    """
    found = load_made(reference, "the tuple of the step's arguments")
    if not isinstance(found, tuple):
        raise InputError(
            f"this is a {type(found).__name__}, and a tuple of the function's arguments is wanted",
            where=reference,
            do="Return (state, batch), or (state,) for a single argument",
        )
    return found


def _imported(reference: str) -> Any:
    module_name, _, attributes = reference.partition(":")
    if module_name.endswith(".py"):
        raise _python_file(reference)
    if not attributes or not all(
        part.isidentifier() for part in (*module_name.split("."), *attributes.split("."))
    ):
        raise InputError(
            f"{reference!r} is not module:name", where="command line", do=_FUNCTION_HELP
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = import_module(module_name)
    except (Exception, SystemExit) as error:  # importing runs the user's code
        raise InputError(
            f"module {module_name} does not import: {type(error).__name__}: {_first_line(error)}",
            where=reference,
            do=_FUNCTION_HELP,
        ) from error
    for name in attributes.split("."):
        if not hasattr(found, name):
            near = get_close_matches(name, [n for n in dir(found) if n[0] != "_"], n=3)
            raise InputError(
                f"there is no {name!r} in {module_name}",
                where=reference,
                do=f"Names near it are {', '.join(near)}" if near else _FUNCTION_HELP,
            )
        found = getattr(found, name)
    return found


def _python_file(reference: str) -> InputError:
    return InputError(
        "this names a Python file, and a module is wanted", where=reference, do=_FUNCTION_HELP
    )


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")


def place_of(error: BaseException) -> str:
    """Where the user's code raised an error, as " (train.py:12)"; empty where it is not there.

    The user's code is what is neither installed nor part of this package.
    """
    here = str(Path(__file__).resolve().parent.parent)
    found = ""
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        foreign = "-packages" in file or file.startswith((here, sys.base_prefix, "<"))
        if not foreign:
            found = f" ({_short(file)}:{trace.tb_lineno})"
        trace = trace.tb_next
    return found


def _short(file: str) -> str:
    return os.path.relpath(file) if file.startswith(os.getcwd() + os.sep) else file


def check_time_limit(seconds: float) -> None:
    """Refuses a --time-limit in which nothing can be done, or that never ends.

    Raises:
      InputError: it is not a finite number above zero.
    """
    if not 0 < seconds < float("inf"):
        raise InputError(
            f"{seconds:g} seconds leave no time", where="--time-limit", do="Give more than 0"
        )


def check_memory_fraction(fraction: float) -> None:
    """Refuses a --memory-fraction that is none.

    Raises:
      InputError: it is not above 0, or above 1.
    """
    if not 0 < fraction <= 1:
        raise InputError(
            f"{fraction:g} is not a part of the memory",
            where="--memory-fraction",
            do="Give a number above 0 and up to 1",
        )


def check_output(path: Path) -> None:
    """Makes sure that a file can be written before any work is done for it.

    Raises:
      InputError: it is a directory, or its directory is missing or cannot be written.
    """
    if path.exists() and not path.is_file():
        if path.is_dir():
            raise InputError("this is a directory", where=str(path), do="Give the path of a file")
        return
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
        if path.exists():
            with path.open("r+b"):
                pass
    except OSError as error:
        raise InputError(
            f"the plan cannot be written here ({error.strerror})",
            where=str(path),
            do="Give --output a path in a directory that exists and can be written",
        ) from None
