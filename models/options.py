"""Options of the reference models, checked before anything is traced."""

import difflib
from collections.abc import Mapping
from math import ceil
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveFloat,
    ValidationError,
    model_validator,
)
from pydantic import NonNegativeFloat as NonNegative

from shardwright.errors import InputError

DType = Literal["float32", "bfloat16"]

_LARGEST_SIZE = 2**31 - 1
_MOST_LAYERS = 4096
_LONGEST_LIST = 4096
_MOST_STAGES = 24
"""Each halves a map or more."""


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("Input should be a number, not true or false")
    return value


Size = Annotated[int, Field(gt=0, le=_LARGEST_SIZE), BeforeValidator(_no_bool)]
"""A size of an array: XLA's indices of one dimension are often 32 bits."""
Depth = Annotated[int, Field(gt=0, le=_MOST_LAYERS), BeforeValidator(_no_bool)]
"""How often something is stacked: where each layer is traced by itself, more would never end."""


class TrainOptions(BaseModel):
    """Options that every reference model takes.

    Attributes:
      batch: examples (sequences) per step, over all devices.
      microbatches: parts of the batch that are computed one after the other, their gradients
        added up: memory for time.
      param_dtype: type in which parameters live and are updated.
      compute_dtype: type in which matrix products run.
      mu_dtype: type of the first moment of AdamW and momentum; None is `param_dtype`.
      optimizer: "adamw", "lamb" (AdamW with a trust ratio for each array) or "momentum" (SGD with
        momentum 0.9).
      learning_rate: step size, constant.
      weight_decay: decoupled weight decay.
      clip_norm: global gradient norm to clip to; None does not clip.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    unit: ClassVar[Literal["tokens", "images", "examples"]] = "tokens"
    """What a step works on."""

    batch: Size
    microbatches: Size = 1
    param_dtype: DType = "float32"
    compute_dtype: DType = "bfloat16"
    mu_dtype: DType | None = None
    optimizer: Literal["adamw", "lamb", "momentum"] = "adamw"
    learning_rate: PositiveFloat = 3e-4
    weight_decay: NonNegative = 0.1
    clip_norm: PositiveFloat | None = 1.0

    @model_validator(mode="after")
    def _microbatches_divide(self) -> Self:
        if self.batch % self.microbatches:
            raise ValueError(f"microbatches={self.microbatches} does not divide batch={self.batch}")
        return self

    @property
    def accumulated(self) -> int:
        """Microbatches whose gradients are added up one after the other."""
        return self.microbatches

    @property
    def items_per_example(self) -> int:
        """How many of its unit an example has."""
        return 1


class NormedOptions(TrainOptions):
    """What models with batch norms share; they keep running statistics.

    Attributes:
      norm_groups: parts of the batch that batch norms take their statistics over; one is the
        whole batch.
    """

    norm_groups: Size = 1

    @model_validator(mode="after")
    def _groups_divide(self) -> Self:
        if self.batch % self.norm_groups:
            raise ValueError(f"norm_groups={self.norm_groups} does not divide batch={self.batch}")
        return self


class ImageOptions(NormedOptions):
    """What models of images share.

    Attributes:
      image: size of each dimension of space.
      classes: that an image, or a pixel, is told apart into.
    """

    unit = "images"

    image: Size
    classes: Size


class ResNetOptions(ImageOptions):
    """A residual network.

    Attributes:
      width: filters of the first stage's blocks; each stage doubles them.
      depths: blocks of each stage.
      block: "bottleneck" blocks of three convolutions, or "basic" ones of two.
    """

    width: Size = 64
    depths: tuple[Depth, ...] = Field((3, 4, 6, 3), min_length=1, max_length=_MOST_STAGES)
    block: Literal["bottleneck", "basic"] = "bottleneck"

    @property
    def strides(self) -> tuple[int, ...]:
        """By which each stage shrinks space."""
        return (1,) + (2,) * (len(self.depths) - 1)


class DetectorOptions(ResNetOptions):
    """A single-shot detector: a residual backbone, layers of ever smaller maps, heads on each.

    Attributes:
      classes: of objects, and one of what is none.
      layers: behind the backbone, each a 1x1 and a 3x3 convolution: filters of both, and the
        stride of the second. With stride 1 it takes no padding, and its map is two smaller.
      anchors: boxes at each place of the backbone's map and of each layer's.
    """

    depths: tuple[Depth, ...] = Field((3, 4, 6), min_length=1, max_length=_MOST_STAGES)
    block: Literal["bottleneck", "basic"] = "basic"
    layers: tuple[tuple[Size, Size, Literal[1, 2]], ...] = Field(max_length=_LONGEST_LIST)
    anchors: tuple[Size, ...]

    @property
    def strides(self) -> tuple[int, ...]:
        """The last stage keeps the size, for a finer first map."""
        return (*super().strides[:-1], 1)

    @property
    def map_sizes(self) -> tuple[int, ...]:
        """Places along a side of each map that has heads; 0 or less where there are none."""
        size = self.image
        for stride in (2, 2, *self.strides):
            size = ceil(size / stride)
        sizes = [size]
        for _, _, stride in self.layers:
            sizes.append(ceil(sizes[-1] / 2) if stride == 2 else sizes[-1] - 2)
        return tuple(sizes)

    @model_validator(mode="after")
    def _maps_agree(self) -> Self:
        maps = len(self.layers) + 1
        if len(self.anchors) != maps:
            raise ValueError(
                f"anchors={self.anchors} are of {len(self.anchors)} maps, and the backbone with "
                f"{len(self.layers)} layers makes {maps}"
            )
        if min(self.map_sizes) < 1:
            raise ValueError(
                f"image={self.image} is too small: the maps are {self.map_sizes} wide, and a layer "
                "of stride 1 takes 2 off"
            )
        return self


class AmoebaNetOptions(ImageOptions):
    """An AmoebaNet-D.

    Attributes:
      cells: that keep the size of space, in three groups; cells that halve it stand before each.
      width: filters inside the cells of the first group; each group doubles them.
    """

    cells: Depth
    width: Size

    @model_validator(mode="after")
    def _groups_are_alike(self) -> Self:
        if self.cells % 3:
            raise ValueError(f"cells={self.cells} is not a multiple of 3, the groups of cells")
        if self.width % 8:
            raise ValueError(
                f"width={self.width} is not a multiple of 8: the first cell has half of it as its "
                "filters, and a quarter of those inside"
            )
        return self


class UNetOptions(ImageOptions):
    """A U-Net.

    Attributes:
      dimensions: of space.
      channels: of the images.
      filters: of the two convolutions of each level, from the top to the bottom.
      halve: whether upsampling halves the channels.
    """

    dimensions: Literal[2, 3] = 2
    channels: Size
    filters: tuple[tuple[Size, Size], ...] = Field(min_length=1, max_length=_MOST_STAGES)
    halve: bool = True

    @model_validator(mode="after")
    def _levels_divide(self) -> Self:
        scale = 2 ** (len(self.filters) - 1)
        if self.image % scale:
            raise ValueError(
                f"image={self.image} is not a multiple of {scale}, by which "
                f"{len(self.filters)} levels shrink it"
            )
        return self


class ConformerOptions(NormedOptions):
    """A Conformer, trained with CTC.

    Attributes:
      layers: number of blocks.
      d_model: width of the residual stream.
      heads: of attention; a divisor of `d_model`.
      d_ff: width inside the feed-forward blocks; None is four times `d_model`.
      kernel: frames that the convolutions of a block reach over.
      features: of a frame of sound.
      frames: of an utterance; two strides leave a quarter of them.
      labels: of an utterance.
      classes: that a label is one of, the blank included.
      remat: "none" keeps every activation, "full" keeps only each block's input.
    """

    unit = "examples"

    layers: Depth
    d_model: Size
    heads: Size
    d_ff: Size | None = None
    kernel: Size = 32
    features: Size = 80
    frames: Size
    labels: Size
    classes: Size
    remat: Literal["none", "full"] = "full"

    @model_validator(mode="after")
    def _lengths_agree(self) -> Self:
        if self.d_model % self.heads:
            raise ValueError(f"heads={self.heads} does not divide d_model={self.d_model}")
        if self.d_model % 2:
            raise ValueError(f"d_model={self.d_model} is odd; sinusoidal positions are pairs")
        if 4 * self.labels > self.frames:
            raise ValueError(
                f"labels={self.labels} are more than a quarter of the frames={self.frames}; CTC "
                "gives each label a frame of its own after two strides"
            )
        return self

    @property
    def feed_forward_width(self) -> int:
        """Width inside the feed-forward blocks, with the default filled in."""
        return self.d_ff or 4 * self.d_model


class LstmOptions(TrainOptions):
    """An LSTM sequence-to-sequence model with attention.

    Attributes:
      layers: of the decoder.
      encoder_layers: of the encoder, whose first reads both ways; None is `layers`.
      d_model: units of every layer, and width of the embedding.
      vocab: rows of the embedding table, which source and target share.
      sequence: tokens per source.
      target_sequence: tokens per target; None is `sequence`.
      remat: "none" keeps the gates of every step of a layer's loop, "full" makes them again.
    """

    layers: Depth
    encoder_layers: Depth | None = None
    d_model: Size
    vocab: Size
    sequence: Size
    target_sequence: Size | None = None
    remat: Literal["none", "full"] = "none"

    @model_validator(mode="after")
    def _encoder_joins_directions(self) -> Self:
        if self.encoder_depth < 2:
            raise ValueError(
                "encoder_layers=1 is too few: a second layer joins both ways of the first"
            )
        return self

    @property
    def encoder_depth(self) -> int:
        """Layers of the encoder, with the default filled in."""
        return self.encoder_layers or self.layers

    @property
    def target_length(self) -> int:
        """Tokens per target, with the default filled in."""
        return self.target_sequence or self.sequence

    @property
    def items_per_example(self) -> int:
        """Tokens of a source and its target."""
        return self.sequence + self.target_length


class MlpOptions(TrainOptions):
    """A classifier of stacked dense layers.

    Attributes:
      features: width of the input.
      hidden: width of the hidden layers.
      layers: number of dense layers, the output layer included.
      classes: width of the output.
    """

    unit = "examples"

    features: Size
    hidden: Size
    layers: Depth
    classes: Size


class DlrmOptions(TrainOptions):
    """A recommendation model with embedding tables.

    Attributes:
      features: dense features of an example.
      tables: rows of each embedding table; an example names one row of each.
      width: of an embedding, and of what the bottom network makes.
      bottom: widths of the network of the dense features; the last is `width`.
      top: widths of the network that ends in the logit.
      row_multiple: tables of more rows than this have their rows rounded up to a multiple of it,
        so that devices can share them by row.
    """

    unit = "examples"

    features: Size
    tables: tuple[Size, ...] = Field(max_length=_LONGEST_LIST)
    width: Size
    bottom: tuple[Size, ...] = Field(max_length=_LONGEST_LIST)
    top: tuple[Size, ...] = Field(max_length=_LONGEST_LIST)
    row_multiple: Size = 1

    @model_validator(mode="after")
    def _networks_agree(self) -> Self:
        if not self.tables or not self.bottom or self.bottom[-1] != self.width:
            raise ValueError(
                f"bottom={self.bottom} must end in width={self.width}, since its result takes part "
                "in the interaction as an embedding does, and there must be a table"
            )
        if not self.top or self.top[-1] != 1:
            raise ValueError(f"top={self.top} must end in 1, the logit")
        if self.microbatches != 1:
            raise ValueError("microbatches are not for tables, whose rows are updated at once")
        return self

    @property
    def table_rows(self) -> tuple[int, ...]:
        """Rows of each table as they are kept."""
        of = self.row_multiple
        return tuple(-(-rows // of) * of if rows > of else rows for rows in self.tables)

    @property
    def joined(self) -> int:
        """Width of what the top network takes: every pair of vectors, and the bottom's result."""
        vectors = len(self.tables) + 1
        return self.width + vectors * (vectors - 1) // 2


_Options = TypeVar("_Options", bound=BaseModel)


def parse_options(
    schema: type[_Options], where: str, preset: Mapping[str, Any], given: Mapping[str, Any]
) -> _Options:
    """The options of a model: its preset with `given` laid over it.

    Args:
      where: what messages name as the place of the options.

    Raises:
      InputError: an unknown option, a value of the wrong type or range, or sizes that disagree.
    """
    unknown = sorted(given.keys() - schema.model_fields.keys())
    if unknown:
        close = difflib.get_close_matches(unknown[0], schema.model_fields, n=1)
        raise InputError(
            f"unknown option {', '.join(map(repr, unknown))}",
            where=where,
            do=(f"Did you mean {close[0]}? " if close else "")
            + f"Its options are {', '.join(sorted(schema.model_fields))}",
        )
    try:
        return schema.model_validate({**preset, **given})
    except ValidationError as error:
        faults = [_fault(detail["loc"], detail["msg"]) for detail in error.errors()]
        raise InputError("; ".join(faults), where=where, do="Change these options") from None


def _fault(location: tuple[int | str, ...], message: str) -> str:
    reason = message.removeprefix("Value error, ")
    return f"option {location[0]!r}: {reason}" if location else reason
