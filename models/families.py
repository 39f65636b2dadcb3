"""The kinds of reference models: where each is written, what options it takes, its presets."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwright.errors import InputError
from shardwright.models.options import (
    AmoebaNetOptions,
    ConformerOptions,
    DetectorOptions,
    DlrmOptions,
    LstmOptions,
    MlpOptions,
    ResNetOptions,
    TrainOptions,
    UNetOptions,
    parse_options,
)
from shardwright.models.presets import (
    AMOEBANETS,
    CONFORMERS,
    DECODERS,
    DETECTORS,
    DLRMS,
    ENCODER_DECODERS,
    ENCODERS,
    LSTMS,
    MIXTURES,
    MLPS,
    RESNETS,
    UNETS,
)
from shardwright.models.transformer_options import (
    DecoderOptions,
    EncoderDecoderOptions,
    EncoderOptions,
    MixtureOptions,
    ServingOptions,
    Transformer,
)

Options = TrainOptions | ServingOptions


@dataclass(frozen=True)
class Family:
    """A kind of model.

    Attributes:
      module: of `shardwright.models`, in which it is written.
      options: of its train step.
      presets: published sizes by name.
      serving: options of its serving steps, where it has any.
    """

    module: str
    options: type[TrainOptions]
    presets: Mapping[str, Mapping[str, Any]]
    serving: type[ServingOptions] | None = None

    def schema(self, step: str) -> type[Options]:
        """The options of a step.

        Raises:
          InputError: there is no such step.
        """
        steps = ["train", *(["prefill", "decode"] if self.serving else [])]
        if step not in steps:
            raise InputError(
                f"there is no step {step!r} of this kind of model",
                where="step",
                do=f"Its steps are {', '.join(steps)}",
            )
        return self.options if step == "train" or self.serving is None else self.serving

    def step_fields(self, step: str) -> frozenset[str]:
        """The options of a step that are about the step, rather than the model."""
        if step == "train":
            return (
                _STEP_FIELDS | TrainOptions.model_fields.keys()
            ) & self.options.model_fields.keys()
        return frozenset(
            (ServingOptions.model_fields.keys() - Transformer.model_fields.keys())
            | {"compute_dtype", "residual_axes"}
        )


_STEP_FIELDS = frozenset(
    {
        "attention", "dispatch", "expert_axes", "frames", "image", "labels", "norm_groups",
        "offloaded", "remat", "repeats", "residual_axes", "saved", "scan_layers", "sequence",
        "stage_axis", "stages", "target_sequence",
    }
)  # fmt: skip

KINDS: dict[str, Family] = {
    "decoder": Family("decoder", DecoderOptions, DECODERS, ServingOptions),
    "encoder": Family("decoder", EncoderOptions, ENCODERS),
    "moe": Family("mixture", MixtureOptions, MIXTURES),
    "encoder_decoder": Family("encoder_decoder", EncoderDecoderOptions, ENCODER_DECODERS),
    "conformer": Family("conformer", ConformerOptions, CONFORMERS),
    "lstm": Family("lstm", LstmOptions, LSTMS),
    "resnet": Family("resnet", ResNetOptions, RESNETS),
    "amoebanet": Family("amoebanet", AmoebaNetOptions, AMOEBANETS),
    "unet": Family("unet", UNetOptions, UNETS),
    "detector": Family("detector", DetectorOptions, DETECTORS),
    "dlrm": Family("dlrm", DlrmOptions, DLRMS),
    "mlp": Family("mlp", MlpOptions, MLPS),
}


def model_names() -> list[str]:
    """Names of the presets."""
    return [name for family in KINDS.values() for name in family.presets]


def known_models() -> list[str]:
    """Names of the presets and of the kinds."""
    return [*model_names(), *(kind for kind in KINDS if kind not in model_names())]


def find(name: str) -> tuple[str, Mapping[str, Any]]:
    """The kind of a preset and its sizes; of a kind, itself and none.

    Raises:
      InputError: there is no such preset or kind.
    """
    for kind, family in KINDS.items():
        if name in family.presets:
            return kind, family.presets[name]
    if name in KINDS:
        return name, {}
    close = difflib.get_close_matches(name, known_models(), n=1)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    raise InputError(
        f"unknown model {name!r}",
        where="models",
        do=f"{hint}The models are {', '.join(model_names())}; kinds, which take all sizes as "
        f"options, are {', '.join(KINDS)}",
    )


def parsed(name: str, options: Mapping[str, Any], where: str | None = None) -> tuple[str, Options]:
    """The kind of a model and its options, "step" among those given.

    Args:
      where: what messages name as the place of the options; the model where None.

    Raises:
      InputError: an unknown name, step or option, or sizes that disagree.
    """
    kind, preset = find(name)
    given = dict(options)
    step = given.get("step", "train")
    schema = KINDS[kind].schema(step)
    if step == "train":
        given.pop("step", None)
    else:
        sizes = schema.model_fields.keys() - KINDS[kind].step_fields(step)
        preset = {option: value for option, value in preset.items() if option in sizes}
    return kind, parse_options(schema, where or f"model {name!r}", preset, given)
