"""Options of language models made of attention and feed-forward blocks."""

import math
from typing import ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    model_validator,
)

from shardwright.models.options import Depth, DType, Size, TrainOptions

MeshAxes = str | tuple[str, ...] | None
"""What shards one dimension of an array, as in a `PartitionSpec`."""

Activation = Literal[
    "decoder_layer_input",
    "query_proj",
    "key_proj",
    "value_proj",
    "context",
    "out_proj",
    "mlpwi_0",
    "mlpwi_1",
    "mlpwo",
]
"""Activations of a decoder layer that can be kept by name: its input, the projections of attention
(with positions turned in), what attention mixes, its output projection, the gate, up (of a block
without a gate, mlpwi_0) and down projections. The names are MaxText's
(`src/MaxText/configs/base.yml`, the options of remat_policy=custom).
"""

FLASH_LENGTH = 128
"""Lengths of sequences that flash attention takes are multiples of this: lanes of a register."""


class Transformer(BaseModel):
    """Sizes of language models made of attention and feed-forward blocks.

    Attributes:
      layers: number of layers; of an encoder-decoder, of its decoder.
      d_model: width of the residual stream.
      heads: query heads.
      kv_heads: key and value heads, a divisor of `heads`; None is `heads` (multi-head attention).
      head_dim: width of a head; None is `d_model / heads`.
      d_ff: width inside the feed-forward block.
      vocab: rows of the embedding table.
      norm: "rms" (RMSNorm, no bias) or "layer" (LayerNorm with bias).
      mlp: "swiglu" or "geglu" (gate, up, down), "gelu" or "relu" (up, down).
      positions: "rope", "learned" (a table of `max_positions` rows added to the embedding),
        "sinusoidal" (added to it, computed) or "relative" (T5: a learned bias of the attention
        scores by distance).
      max_positions: rows of the learned table; None is as many as a sequence has.
      rope_theta: base of the rotary frequencies.
      biases: whether projections have biases.
      tied_embedding: whether the output projection is the embedding table.
      norm_epsilon: added to the variance in the norms.
      compute_dtype: type in which matrix products run.
      residual_axes: mesh axes of the residual stream [batch, sequence, d_model], set with
        `with_sharding_constraint`; needs a mesh context. None leaves it to the planner.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    layers: Depth
    d_model: Size
    heads: Size
    kv_heads: Size | None = None
    head_dim: Size | None = None
    d_ff: Size
    vocab: Size
    norm: Literal["rms", "layer"] = "rms"
    mlp: Literal["swiglu", "geglu", "gelu", "relu"] = "swiglu"
    positions: Literal["rope", "learned", "sinusoidal", "relative"] = "rope"
    max_positions: Size | None = None
    rope_theta: PositiveFloat = 10_000.0
    biases: bool = False
    tied_embedding: bool = False
    norm_epsilon: PositiveFloat = 1e-5
    compute_dtype: DType = "bfloat16"
    residual_axes: tuple[MeshAxes, MeshAxes, MeshAxes] | None = None

    @model_validator(mode="after")
    def _sizes_agree(self) -> Self:
        if self.heads % self.key_value_heads:
            raise ValueError(
                f"kv_heads={self.kv_heads} does not divide heads={self.heads}; "
                "each key head serves the same number of query heads"
            )
        if self.head_dim is None and self.d_model % self.heads:
            raise ValueError(
                f"heads={self.heads} does not divide d_model={self.d_model}; "
                "choose sizes that divide, or give head_dim"
            )
        if self.positions == "rope" and self.head_width % 2:
            raise ValueError(f"head_dim={self.head_width} is odd; rotary embedding turns pairs")
        if self.positions == "sinusoidal" and self.d_model % 2:
            raise ValueError(f"d_model={self.d_model} is odd; sinusoidal positions are pairs")
        return self

    @property
    def key_value_heads(self) -> int:
        """Key and value heads, with the default filled in."""
        return self.kv_heads or self.heads

    @property
    def head_width(self) -> int:
        """Width of one head, with the default filled in."""
        return self.head_dim or self.d_model // self.heads

    @property
    def mlp_matrices(self) -> int:
        """Matrices of a feed-forward block."""
        return 3 if self.mlp in ("swiglu", "geglu") else 2


class TransformerOptions(Transformer, TrainOptions):
    """What the training of Transformers takes.

    Attributes:
      sequence: tokens per sequence; of an encoder-decoder, of its source.
      scan_layers: one stacked parameter tree and `lax.scan`, or a list of layers.
      remat: "none" keeps every activation, "full" keeps only each layer's input, "dots" keeps
        also the results of the matrix products with weights, "names" keeps those that `saved` and
        `offloaded` name.
      saved: activations to keep in HBM, by name.
      offloaded: activations to keep in the host's memory, by name.
      attention: "dot" writes the scores of every head to memory; "flash" does not: it runs JAX's
        Pallas kernels on TPU, as one planned operation, and needs `sequence` to be a multiple of
        128 and positions other than "relative".
    """

    sequence: Size
    scan_layers: bool = True
    remat: Literal["none", "full", "dots", "names"] = "full"
    saved: tuple[Activation, ...] = ()
    offloaded: tuple[Activation, ...] = ()
    attention: Literal["dot", "flash"] = "dot"

    @model_validator(mode="after")
    def _step_agrees(self) -> Self:
        if (self.saved or self.offloaded) and self.remat != "names":
            raise ValueError(
                f"saved and offloaded need remat='names', and remat is {self.remat!r}; change one"
            )
        if self.attention == "flash" and self.sequence % FLASH_LENGTH:
            raise ValueError(
                f"sequence={self.sequence} is not a multiple of {FLASH_LENGTH}, which "
                "attention='flash' needs"
            )
        if self.attention == "flash" and self.positions == "relative":
            raise ValueError(
                "attention='flash' takes no bias of the scores, which positions='relative' adds; "
                "use attention='dot' or other positions"
            )
        if self.positions == "learned" and self.sequence > self.position_rows:
            raise ValueError(
                f"sequence={self.sequence} is longer than max_positions={self.max_positions}; "
                "raise max_positions or shorten the sequence"
            )
        return self

    @property
    def items_per_example(self) -> int:
        """Tokens of a sequence."""
        return self.sequence

    @property
    def position_rows(self) -> int:
        """Rows of the learned position table, with the default filled in."""
        return self.max_positions or self.sequence


class DecoderOptions(TransformerOptions):
    """A dense decoder-only language model.

    Attributes:
      causal: whether a position attends only to those up to it; without, this is an encoder.
      stages: parts of the layers that work on different microbatches at the same time, as a
        pipeline (`sw.pipeline`). They are one more dimension to shard; `microbatches` are then
        those that go through them, and `remat` is of a whole stage. 1 is no pipeline, of which the
        next three say nothing.
      repeats: how often a microbatch goes through all stages.
      replicas: parts of each microbatch of a pipeline that a copy of the weights each works on, so
        that their gradients are added up once a step (`sw.pipeline`).
      stage_axis: mesh axis of the stages, set as `residual_axes` is.
    """

    causal: bool = True
    stages: Depth = 1
    repeats: Depth = 1
    replicas: Size = 1
    stage_axis: str | None = None

    @model_validator(mode="after")
    def _stages_agree(self) -> Self:
        if self.stages == 1:
            return self
        if self.blocks % (self.stages * self.repeats):
            raise ValueError(
                f"stages={self.stages} x repeats={self.repeats} does not divide the "
                f"{self.blocks} layers, or blocks of layers, that are alike"
            )
        if self.repeats > 1 and self.microbatches % self.stages:
            raise ValueError(
                f"microbatches={self.microbatches} is not a multiple of stages={self.stages}, "
                "which repeats need"
            )
        if self.batch % (self.microbatches * self.replicas):
            raise ValueError(
                f"microbatches={self.microbatches} x replicas={self.replicas} does not divide "
                f"batch={self.batch}"
            )
        if not self.scan_layers:
            raise ValueError("stages are cut from one stack of layers; leave scan_layers true")
        return self

    @property
    def blocks(self) -> int:
        """How many layers, or blocks of layers, follow one another with equal shapes."""
        return self.layers

    @property
    def accumulated(self) -> int:
        """Microbatches whose gradients are added up one after the other; a pipeline's are not."""
        return 1 if self.stages > 1 else self.microbatches


class EncoderDecoderOptions(TransformerOptions):
    """An encoder of a source and a decoder of a target that attends to it.

    Attributes:
      encoder_layers: layers of the encoder; None is `layers`.
      target_sequence: tokens per target; None is `sequence`.
    """

    encoder_layers: Depth | None = None
    target_sequence: Size | None = None

    @model_validator(mode="after")
    def _targets_agree(self) -> Self:
        if self.attention == "flash" and self.target_length % FLASH_LENGTH:
            raise ValueError(
                f"target_sequence={self.target_length} is not a multiple of {FLASH_LENGTH}, which "
                "attention='flash' needs"
            )
        if self.positions == "learned" and self.target_length > self.position_rows:
            raise ValueError(
                f"target_sequence={self.target_length} is longer than the "
                f"{self.position_rows} learned positions; raise max_positions"
            )
        return self

    @property
    def items_per_example(self) -> int:
        """Tokens of a source and its target."""
        return self.sequence + self.target_length

    @property
    def encoder_depth(self) -> int:
        """Layers of the encoder, with the default filled in."""
        return self.encoder_layers or self.layers

    @property
    def target_length(self) -> int:
        """Tokens per target, with the default filled in."""
        return self.target_sequence or self.sequence


class EncoderOptions(DecoderOptions):
    """An encoder: a decoder whose positions attend to all others.

    Attributes:
      causal: false.
    """

    causal: Literal[False] = False


class ServingOptions(Transformer):
    """A serving step of a dense decoder with a cache of keys and values.

    Attributes:
      step: "prefill" reads prompts, "decode" makes one token of each sequence.
      batch: sequences per step, over all devices.
      context: positions that the cache holds of each sequence; decoding attends to all of them.
      prompt: tokens of a prompt in prefill; None is `context`.
      weights: type of the weights; "int8" has a scale for each output channel.
      cache_dtype: type of the cache; None is `compute_dtype`. "int8" has a scale for each position
        of each head.
      attention: in prefill, "dot" writes the scores of every head to memory; "flash" runs JAX's
        Pallas kernels and needs prompts of a multiple of 128 tokens.
    """

    unit: ClassVar[Literal["tokens", "images", "examples"]] = "tokens"

    step: Literal["prefill", "decode"]
    batch: Size = 32
    context: Size = 2048
    prompt: Size | None = None
    weights: Literal["bfloat16", "float32", "int8"] = "bfloat16"
    cache_dtype: DType | Literal["int8"] | None = None
    attention: Literal["dot", "flash"] = "dot"

    @model_validator(mode="after")
    def _lengths_agree(self) -> Self:
        if self.prompt is not None and self.step == "decode":
            raise ValueError("prompt is of prefill; a step of decoding takes one token")
        if self.step_tokens > self.context:
            raise ValueError(f"prompt={self.prompt} is longer than context={self.context}")
        if self.attention == "flash" and self.step_tokens % FLASH_LENGTH:
            raise ValueError(
                f"{self.step_tokens} tokens are not a multiple of {FLASH_LENGTH}, which "
                "attention='flash' needs"
            )
        if self.positions == "relative":
            raise ValueError("positions='relative' are of encoder-decoders, which are not served")
        if self.positions == "learned" and self.context > (self.max_positions or self.context):
            raise ValueError(
                f"context={self.context} is longer than max_positions={self.max_positions}"
            )
        return self

    @property
    def step_tokens(self) -> int:
        """Tokens of each sequence that a step takes."""
        return (self.prompt or self.context) if self.step == "prefill" else 1

    @property
    def items_per_example(self) -> int:
        """Tokens of each sequence that a step takes."""
        return self.step_tokens

    @property
    def cache_type(self) -> str:
        """Type of the cache, with the default filled in."""
        return self.cache_dtype or self.compute_dtype


class MixtureOptions(DecoderOptions):
    """A decoder-only language model with mixtures of experts.

    Attributes:
      experts: routed experts of a mixture.
      experts_per_token: experts that a token is sent to.
      expert_d_ff: width inside an expert; None is `d_ff`.
      shared_experts: experts that every token goes through besides.
      dispatch: "capacity" sends tokens by products with masks, and drops those beyond an expert's
        capacity; "dropless" sorts them by expert and multiplies each expert's rows by its weights
        (JAX's Pallas kernels on TPU).
      capacity_factor: tokens that an expert takes of a sequence, as a multiple of its even share;
        what is sent to it beyond goes without it.
      layers_per_block: every so many layers, the last has a mixture instead of a dense block.
      balance_weight: of the load-balancing loss.
      expert_axes: mesh axes of what experts take and make [experts, batch, capacity, d_model], set
        as `residual_axes` is.
      token_axes: the same of these arrays as they are dispatched and combined, where tokens are.
    """

    experts: Size
    experts_per_token: Size = 2
    expert_d_ff: Size | None = None
    shared_experts: int = Field(0, ge=0, le=4096)
    dispatch: Literal["capacity", "dropless"] = "capacity"
    capacity_factor: PositiveFloat = 1.25
    layers_per_block: Depth = 1
    balance_weight: NonNegativeFloat = 0.01
    expert_axes: tuple[MeshAxes, MeshAxes, MeshAxes, MeshAxes] | None = None
    token_axes: tuple[MeshAxes, MeshAxes, MeshAxes, MeshAxes] | None = None

    @model_validator(mode="after")
    def _experts_agree(self) -> Self:
        if self.dispatch == "dropless" and self.biases:
            raise ValueError("dispatch='dropless' has no biases; set biases=False")
        if self.experts_per_token > self.experts:
            raise ValueError(
                f"experts_per_token={self.experts_per_token} is more than the "
                f"experts={self.experts} that there are"
            )
        if self.layers % self.layers_per_block:
            raise ValueError(
                f"layers_per_block={self.layers_per_block} does not divide layers={self.layers}"
            )
        return self

    @property
    def blocks(self) -> int:
        """How many blocks of layers, of which the last has a mixture, follow one another."""
        return self.layers // self.layers_per_block

    @property
    def expert_width(self) -> int:
        """Width inside an expert, with the default filled in."""
        return self.expert_d_ff or self.d_ff

    @property
    def capacity(self) -> int:
        """Slots of each expert for one sequence."""
        share = self.experts_per_token * self.sequence / self.experts
        return min(self.sequence, math.ceil(share * self.capacity_factor))
