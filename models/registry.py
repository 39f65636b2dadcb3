"""Reference models by name."""

import difflib
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from shardwright.errors import InputError
from shardwright.models.options import (
    ConformerOptions,
    DecoderOptions,
    DlrmOptions,
    EncoderDecoderOptions,
    LstmOptions,
    MixtureOptions,
    MlpOptions,
    NormedOptions,
    ResNetOptions,
    TrainOptions,
    UNetOptions,
    parse_options,
)
from shardwright.models.presets import (
    CONFORMERS,
    DECODERS,
    DLRMS,
    ENCODER_DECODERS,
    LSTMS,
    MIXTURES,
    MLPS,
    RESNETS,
    UNETS,
)

_FAMILIES: dict[str, tuple[type[TrainOptions], dict[str, dict[str, Any]]]] = {
    "decoder": (DecoderOptions, DECODERS),
    "mixture": (MixtureOptions, MIXTURES),
    "encoder_decoder": (EncoderDecoderOptions, ENCODER_DECODERS),
    "conformer": (ConformerOptions, CONFORMERS),
    "lstm": (LstmOptions, LSTMS),
    "resnet": (ResNetOptions, RESNETS),
    "unet": (UNetOptions, UNETS),
    "dlrm": (DlrmOptions, DLRMS),
    "mlp": (MlpOptions, MLPS),
}
"""Module -> the options that it takes and its presets by name."""


@dataclass(frozen=True)
class ReferenceModel:
    """A model with its whole train step.

    Attributes:
      name: the name that it was built by.
      options: every option, defaults filled in.
      train_step: `(state, batch) -> (state, metrics)`; state is {"params", "statistics",
        "opt_state", "step"}, the statistics empty where a model keeps none.
      example_args: state and batch as trees of `jax.ShapeDtypeStruct`; nothing is allocated.
      donate_argnums: the arguments whose memory the step may reuse.
      init: state of a seed, allocated on the default device.
      make_batch: random batch of a seed, allocated on the default device.
      tokens_per_step: tokens in a batch, or what `options.unit` says.
      model_flops_per_step: matmul FLOPs that MFU is a fraction of, recomputation not counted.
      parameter_count: number of parameters.
    """

    name: str
    options: TrainOptions
    train_step: Callable[[Any, Any], tuple[Any, Any]]
    example_args: tuple[Any, Any]
    donate_argnums: tuple[int, ...]
    init: Callable[[int], Any]
    make_batch: Callable[[int], Any]
    tokens_per_step: int
    model_flops_per_step: int
    parameter_count: int

    def facts(self) -> dict[str, Any]:
        """What there is to tell of it, as JSON has it."""
        return {
            "name": self.name,
            "parameters": self.parameter_count,
            "tokens_per_step": self.tokens_per_step,
            "unit": self.options.unit,
            "model_flops_per_step": self.model_flops_per_step,
            "options": self.options.model_dump(mode="json"),
        }


def model_names() -> list[str]:
    """Names that `build` takes."""
    return [name for _, presets in _FAMILIES.values() for name in presets]


def build(name: str, **options: Any) -> ReferenceModel:
    """The reference model `name`, its published sizes changed by `options`.

    Raises:
      InputError: an unknown name or option, or sizes that disagree.
    """
    family, parsed = _parsed(name, options)
    return _assemble(name, import_module(f"shardwright.models.{family}"), parsed)


def checked_options(name: str, options: dict[str, Any]) -> TrainOptions:
    """The options of model `name`, its published sizes changed by `options`; nothing is traced.

    Raises:
      InputError: an unknown name or option, or sizes that disagree.
    """
    return _parsed(name, options)[1]


def _parsed(name: str, options: dict[str, Any]) -> tuple[str, TrainOptions]:
    """The module of a model and its options."""
    for family, (schema, presets) in _FAMILIES.items():
        if name in presets:
            return family, parse_options(schema, name, presets[name], options)
    close = difflib.get_close_matches(name, model_names(), n=1)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    raise InputError(
        f"unknown model {name!r}",
        where="models",
        do=f"{hint}The models are {', '.join(model_names())}",
    )


def _assemble(name: str, module: Any, options: TrainOptions) -> ReferenceModel:
    import jax

    from shardwright.models.training import (
        Loss,
        make_init,
        make_train_step,
        without_statistics,
    )

    if isinstance(options, DlrmOptions):
        # Its tables are updated where rows were looked up, not by an optimizer.
        train_step = module.make_train_step(options)
        init = functools.partial(module.init_state, options)
    else:
        loss = functools.partial(module.loss, options)
        stateful: Loss = loss if isinstance(options, NormedOptions) else without_statistics(loss)
        train_step = make_train_step(stateful, options)
        init = make_init(functools.partial(module.init_params, options), options)
    make_batch = functools.partial(module.make_batch, options)
    state, batch = (jax.eval_shape(make, jax.random.key(0)) for make in (init, make_batch))
    return ReferenceModel(
        name=name,
        options=options,
        train_step=train_step,
        example_args=(state, batch),
        donate_argnums=(0,),
        init=lambda seed: jax.jit(init)(jax.random.key(seed)),
        make_batch=lambda seed: jax.jit(make_batch)(jax.random.key(seed)),
        tokens_per_step=options.batch * options.items_per_example,
        model_flops_per_step=module.model_flops(options),
        parameter_count=sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state["params"])),
    )
