"""Models described in a file: TOML, or YAML where PyYAML is installed.

A file names a kind or the preset that it extends, then has a section of the model's sizes and one
of the step, `train` or `serve`; `plan` says on which slice (docs/models.md).
"""

from __future__ import annotations

import json
import textwrap
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shardwright.errors import InputError
from shardwright.models.families import KINDS, Options, find, parsed
from shardwright.models.options import Size

SUFFIXES = (".toml", ".yaml", ".yml")
"""Of the files that are read as configurations."""

_NONE = "none"
"""How a file, as TOML has no null, says that an option is to have no value."""


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class PlanSection(_Table):
    """Where to plan it; what the command line says counts before this.

    Attributes:
      topology: the slice, such as "v5e:16x16".
      mesh: axis -> size, where the mesh must be this one.
    """

    topology: str | None = None
    mesh: dict[str, Size] | None = None


class _File(_Table):
    name: str | None = Field(None, min_length=1)
    kind: str | None = None
    extends: str | None = None
    model: dict[str, Any] = {}
    train: dict[str, Any] | None = None
    serve: dict[str, Any] | None = None
    plan: PlanSection = PlanSection()


@dataclass(frozen=True)
class ModelConfig:
    """A configuration file, its options not yet checked against those of the model.

    Attributes:
      path: of the file.
      name: of the model; that of the file, without its suffix, where it gives none.
      base: the kind or the preset that the options change.
      named_as: which of the two the file calls it.
      sections: "model" and "train" or "serve" -> their fields.
      plan: where to plan it.
    """

    path: Path
    name: str
    base: str
    named_as: Literal["kind", "extends"]
    sections: Mapping[str, Mapping[str, Any]]
    plan: PlanSection

    @property
    def step(self) -> Literal["train", "serve"]:
        """Which section there is beside the model's; training where neither is given."""
        return "serve" if "serve" in self.sections else "train"


def is_config(target: str) -> bool:
    """Whether a target is the path of a configuration file, by its suffix."""
    return target.endswith(SUFFIXES)


def read_config(path: str | Path) -> ModelConfig:
    """Reads a configuration file.

    Raises:
      InputError: it cannot be read, is malformed, has an unknown section or field outside the
        sections of the model and the step, or does not say what it describes.
    """
    path = Path(path)
    raw = _parsed(path)
    try:
        file = _File.model_validate(raw)
    except ValidationError as error:
        raise InputError(
            "; ".join(_fault(detail) for detail in error.errors()),
            where=str(path),
            do="See docs/models.md, or start from `shardwright models llama3-8b --toml`",
        ) from None
    if (file.kind is None) == (file.extends is None):
        fault = (
            "neither kind nor extends is given"
            if file.kind is None
            else ("both kind and extends are given")
        )
        raise InputError(
            fault, where=str(path), do='Write one of them: kind = "decoder", extends = "llama3-8b"'
        )
    if file.train is not None and file.serve is not None:
        raise InputError(
            "there are both [train] and [serve]", where=str(path), do="Leave one of them out"
        )
    sections = {"model": file.model}
    if file.serve is not None:
        sections["serve"] = file.serve
    else:
        sections["train"] = file.train or {}
    base = file.kind or file.extends or ""
    named_as: Literal["kind", "extends"] = "extends" if file.kind is None else "kind"
    return ModelConfig(path, file.name or path.stem, base, named_as, sections, file.plan)


def _parsed(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise InputError(
            f"the file cannot be read ({reason})", where=str(path), do="Check its path"
        ) from None
    try:
        if path.suffix == ".toml":
            return tomllib.loads(text)
        return _yaml(text, path)
    except ValueError as error:
        raise InputError(
            f"this is not {path.suffix[1:].upper()}: {error}",
            where=str(path),
            do="Correct it there",
        ) from None


def _yaml(text: str, path: Path) -> Any:
    try:
        import yaml
    except ImportError:
        raise InputError(
            "reading YAML needs PyYAML",
            where=str(path),
            do="pip install 'shardwright[yaml]', or write the file as TOML",
        ) from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def _fault(detail: Any) -> str:
    place = ".".join(map(str, detail["loc"]))
    if detail["type"] == "extra_forbidden":
        table = PlanSection if detail["loc"][0] == "plan" else _File
        return f"unknown field {place!r}" + near(str(detail["loc"][-1]), list(table.model_fields))
    message: str = detail["msg"]
    return f"{place}: {message}" if place else "a table of fields is wanted"


def near(name: str, known: list[str]) -> str:
    """What a wrong name may have meant, to end a message with."""
    close = get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def configured(config: ModelConfig, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the model that a file describes, those given laid over them.

    Where the step is given and is not that of the file's section, only the file's [model] counts.

    Raises:
      InputError: the file's kind or preset is unknown, a field is unknown or in the wrong section,
        an option has a wrong value, or sizes disagree.
    """
    serving = {"prefill", "decode"}
    default = config.sections.get("serve", {}).get("step", "decode")
    step = str(options.get("step", default if config.step == "serve" else "train"))
    try:
        kind, _ = find(config.base)
    except InputError as error:
        do = error.do
        if is_config(config.base):
            do = f"It cannot be another file: give the name of a model or a kind. {do}"
        raise InputError(error.what, where=f"{config.path}, {config.named_as}", do=do) from None
    schema, step_fields = KINDS[kind].schema(step), KINDS[kind].step_fields(step)
    sections = dict(config.sections)
    if (step in serving) != (config.step == "serve"):
        sections = {"model": config.sections["model"]}
    in_file = _joined(config, sections, list(schema.model_fields), step_fields)
    for option, value in in_file.items():
        if value == _NONE and _may_be_none(schema, option):
            in_file[option] = None
    chosen = in_file | dict(options)
    if step in serving:
        chosen["step"] = step
    parsed(config.base, chosen, where=str(config.path))
    return chosen


def _may_be_none(schema: type[Options], option: str) -> bool:
    return type(None) in typing.get_args(schema.model_fields[option].annotation)


def _joined(
    config: ModelConfig,
    sections: Mapping[str, Mapping[str, Any]],
    fields: list[str],
    step_fields: frozenset[str],
) -> dict[str, Any]:
    """The fields of all sections in one, each checked to be in its own."""
    options: dict[str, Any] = {}
    for section, given in sections.items():
        own = [name for name in fields if (name in step_fields) == (section != "model")]
        for name, value in given.items():
            if name in own:
                options[name] = value
                continue
            where = f"{config.path}, [{section}]"
            if name in fields:
                other = config.step if section == "model" else "model"
                raise InputError(
                    f"{name!r} belongs to [{other}]", where=where, do=f"Move it to [{other}]"
                )
            raise InputError(
                f"unknown field {name!r}{near(name, own)}",
                where=where,
                do=f"Its fields are {', '.join(sorted(own))}",
            )
    return options


def config_text(
    kind: str, name: str, options: Mapping[str, Any], meanings: Mapping[str, str]
) -> str:
    """A configuration file in TOML.

    Args:
      options: every option as JSON has it; those that are None by default are written as comments.
      meanings: what options mean, to be written as comments.
    """
    step = str(options.get("step", "train"))
    step_fields, fields = KINDS[kind].step_fields(step), KINDS[kind].schema(step).model_fields
    lines = [f"kind = {_toml(kind)}", f"name = {_toml(name)}"]
    for section in ("model", "train" if step == "train" else "serve"):
        lines += ["", f"[{section}]"]
        for option, value in options.items():
            if (option in step_fields) != (section != "model"):
                continue
            if option in meanings:
                lines += textwrap.wrap(
                    meanings[option], 98, initial_indent="# ", subsequent_indent="# "
                )
            unset = value is None and fields[option].default is None
            written = _toml(_NONE if value is None else value)
            lines.append(f"# {option} =" if unset else f"{option} = {written}")
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value)
