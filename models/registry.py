"""Reference models by name."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardwright.models.families import KINDS, Options, known_models, model_names, parsed
from shardwright.models.options import DlrmOptions, NormedOptions, TrainOptions
from shardwright.models.transformer_options import ServingOptions

if TYPE_CHECKING:
    import jax

__all__ = ["ReferenceModel", "build", "checked_options", "known_models", "model_names"]


@dataclass(frozen=True)
class ReferenceModel:
    """A model with a whole step: of training, or of serving (`shardwright.models.serving`).

    Attributes:
      name: the name that it was built by.
      kind: of model, such as "decoder".
      options: every option, defaults filled in.
      step: `(state, batch) -> (state, metrics)` in training; state is {"params", "statistics",
        "opt_state", "step"}, the statistics empty where a model keeps none. In serving
        `(params, cache, tokens) -> (cache, tokens)`.
      example_args: of the step, as trees of `jax.ShapeDtypeStruct`; nothing is allocated.
      donate_argnums: the arguments whose memory the step may reuse.
      init: the first argument of a seed, allocated on the default device.
      make_batch: the last argument of a seed, random, allocated on the default device.
      tokens_per_step: tokens in a batch, or what `options.unit` says.
      model_flops_per_step: matmul FLOPs that MFU is a fraction of, recomputation not counted.
      parameter_count: number of parameters.
    """

    name: str
    kind: str
    options: Options
    step: Callable[..., tuple[Any, Any]]
    example_args: tuple[Any, ...]
    donate_argnums: tuple[int, ...]
    init: Callable[[int], Any]
    make_batch: Callable[[int], Any]
    tokens_per_step: int
    model_flops_per_step: int
    parameter_count: int

    @property
    def train_step(self) -> Callable[..., tuple[Any, Any]]:
        """The step, by its name in training."""
        return self.step

    def facts(self) -> dict[str, Any]:
        """What there is to tell of it, as JSON has it."""
        return {
            "name": self.name,
            "kind": self.kind,
            "parameters": self.parameter_count,
            "tokens_per_step": self.tokens_per_step,
            "unit": self.options.unit,
            "model_flops_per_step": self.model_flops_per_step,
            "options": self.options.model_dump(mode="json"),
        }


def build(name: str, **options: Any) -> ReferenceModel:
    """The reference model `name`, its published sizes changed by `options`.

    Args:
      name: of a preset, or of a kind, which takes all sizes as options.
      options: of the model's step; `step` is "train", or of a decoder "prefill" or "decode".

    Raises:
      InputError: an unknown name or option, or sizes that disagree.
    """
    kind, chosen = parsed(name, options)
    if isinstance(chosen, ServingOptions):
        return _served(name, kind, chosen)
    return _trained(name, kind, chosen)


def checked_options(name: str, options: dict[str, Any]) -> Options:
    """The options of model `name`, its published sizes changed by `options`; nothing is traced.

    Raises:
      InputError: an unknown name or option, or sizes that disagree.
    """
    return parsed(name, options)[1]


def _served(name: str, kind: str, options: ServingOptions) -> ReferenceModel:
    import jax

    from shardwright.models import serving

    init = functools.partial(serving.init_params, options)
    make_tokens = functools.partial(serving.make_tokens, options)
    params, tokens = (jax.eval_shape(make, _key(0)) for make in (init, make_tokens))
    cache = jax.eval_shape(functools.partial(serving.init_state, options))
    return ReferenceModel(
        name=name,
        kind=kind,
        options=options,
        step=functools.partial(serving.serve, options),
        example_args=(params, cache, tokens),
        donate_argnums=(1,),
        init=lambda seed: jax.jit(init)(_key(seed)),
        make_batch=lambda seed: jax.jit(make_tokens)(_key(seed)),
        tokens_per_step=options.batch * options.items_per_example,
        model_flops_per_step=serving.model_flops(options),
        parameter_count=serving.weight_count(params),
    )


def _trained(name: str, kind: str, options: TrainOptions) -> ReferenceModel:
    import jax

    from shardwright.models.training import (
        Loss,
        make_init,
        make_train_step,
        without_statistics,
    )

    module: Any = import_module(f"shardwright.models.{KINDS[kind].module}")
    init: Callable[[jax.Array], Any]
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
    state, batch = (jax.eval_shape(make, _key(0)) for make in (init, make_batch))
    return ReferenceModel(
        name=name,
        kind=kind,
        options=options,
        step=train_step,
        example_args=(state, batch),
        donate_argnums=(0,),
        init=lambda seed: jax.jit(init)(_key(seed)),
        make_batch=lambda seed: jax.jit(make_batch)(_key(seed)),
        tokens_per_step=options.batch * options.items_per_example,
        model_flops_per_step=module.model_flops(options),
        parameter_count=sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state["params"])),
    )


def _key(seed: int) -> "jax.Array":
    """A key of XLA's own generator; Threefry, once for each shape, compiles ten times as long."""
    import jax

    return jax.random.key(seed, impl="rbg")
