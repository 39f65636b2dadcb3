"""SSD: single-shot detectors of a residual backbone, with class and box heads on maps of all sizes.

Targets are those of every anchor, as an input pipeline matches them: its class, 0 where it is of no
object, and the offsets of its box. Maps keep their space and their anchors apart,
[batch, height, width, anchors], up to the loss of each anchor, so that they can be cut over space.

Source: Liu et al., SSD (2016), sections 2.1 and 2.2; the backbone and the layers without pooling
  of MLPerf Training's reference (mlcommons/training, single_stage_detector).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from shardwright.models.convolution import convolve, init_convolution
from shardwright.models.options import DetectorOptions
from shardwright.models.resnet import backbone_channels, backbone_macs, features, init_backbone
from shardwright.models.training import PyTree, cross_entropies

_NEGATIVES = 3
"""Anchors of no object that count for each that has one; SSD, section 2.2."""
_BOX = 4


def init_params(options: DetectorOptions, key: jax.Array) -> PyTree:
    """Parameters of the backbone, the layers behind it and the heads."""
    backbone_key, key = jax.random.split(key)
    keys = iter(jax.random.split(key, 2 * len(options.layers) + 2 * len(options.anchors)))

    def convolution(size: int, channels: int, filters: int) -> PyTree:
        kernel = init_convolution(next(keys), (size, size), channels, filters, options.param_dtype)
        return {"kernel": kernel, "bias": jnp.zeros(filters, options.param_dtype)}

    params = {"backbone": init_backbone(options, backbone_key)}
    channels = [backbone_channels(options)]
    for number, (inner, outer, _) in enumerate(options.layers):
        params[f"layer{number}"] = {
            "reduce": convolution(1, channels[-1], inner),
            "space": convolution(3, inner, outer),
        }
        channels.append(outer)
    for number, (width, anchors) in enumerate(zip(channels, options.anchors, strict=True)):
        params[f"head{number}"] = {
            "classes": convolution(3, width, anchors * options.classes),
            "boxes": convolution(3, width, anchors * _BOX),
        }
    return params


def apply(
    options: DetectorOptions, params: PyTree, statistics: PyTree, images: jax.Array
) -> tuple[list[jax.Array], list[jax.Array], PyTree]:
    """Of each map logits [batch, height, width, anchors, classes] and offsets [..., 4].

    Returns: also the backbone's new statistics.
    """
    x, seen = features(options, params["backbone"], statistics["backbone"], images)
    maps = [x]
    for number, (_, _, stride) in enumerate(options.layers):
        weights = params[f"layer{number}"]
        x = jax.nn.relu(_biased(x, weights["reduce"]))
        x = jax.nn.relu(_biased(x, weights["space"], stride, "SAME" if stride > 1 else "VALID"))
        maps.append(x)
    logits, offsets = [], []
    for number, (x, anchors) in enumerate(zip(maps, options.anchors, strict=True)):
        head = params[f"head{number}"]
        places = x.shape[:3]
        logits.append(_biased(x, head["classes"]).reshape(*places, anchors, options.classes))
        offsets.append(_biased(x, head["boxes"]).reshape(*places, anchors, _BOX))
    return logits, offsets, {"backbone": seen}


def _biased(x: jax.Array, weights: PyTree, stride: int = 1, padding: str = "SAME") -> jax.Array:
    bias: jax.Array = weights["bias"].astype(x.dtype)
    return convolve(x, weights["kernel"], stride, padding) + bias


def loss(
    options: DetectorOptions, params: PyTree, statistics: PyTree, batch: dict[str, PyTree]
) -> tuple[jax.Array, PyTree]:
    """Losses of classes and boxes over the number of anchors that have an object; new statistics.

    Of the anchors without one, those of an image with the largest losses count: the hard ones.
    """
    logits, offsets, new = apply(options, params, statistics, batch["images"])
    labels, boxes = batch["labels"], batch["boxes"]
    by_class = _joined([cross_entropies(*pair) for pair in zip(logits, labels, strict=True)])
    by_box = _joined([_smooth(a - b) for a, b in zip(offsets, boxes, strict=True)])
    positive = _joined(labels) > 0
    objects = jnp.sum(positive, axis=1, keepdims=True)
    losses = lax.stop_gradient(jnp.where(positive, -1.0, by_class))
    # The rank of each is its place in what sorts them: the permutation, inverted by sorting it.
    ranks = jnp.argsort(jnp.argsort(-losses, axis=1), axis=1)
    counted = positive | (ranks < _NEGATIVES * objects)
    total = jnp.sum(jnp.where(counted, by_class, 0.0)) + jnp.sum(jnp.where(positive, by_box, 0.0))
    return total / jnp.maximum(jnp.sum(objects), 1), new


def _joined(maps: list[jax.Array]) -> jax.Array:
    """What anchors have in all maps, [batch, anchors of an image]."""
    return jnp.concatenate([part.reshape(part.shape[0], -1) for part in maps], axis=1)


def _smooth(difference: jax.Array) -> jax.Array:
    """The smooth L1 norm of the last dimension, in float32.

    Source: Girshick, Fast R-CNN (2015), equation 3.
    """
    size = jnp.abs(difference.astype(jnp.float32))
    return jnp.sum(jnp.where(size < 1, 0.5 * size**2, size - 0.5), axis=-1)


def make_batch(options: DetectorOptions, key: jax.Array) -> dict[str, PyTree]:
    """Random images [batch, height, width, 3], and of each map the labels and boxes of anchors."""
    images_key, key = jax.random.split(key)
    keys = iter(jax.random.split(key, 3 * len(options.anchors)))
    shapes = [
        (options.batch, size, size, anchors)
        for size, anchors in zip(options.map_sizes, options.anchors, strict=True)
    ]
    image = (options.batch, options.image, options.image, 3)
    labels = [
        jax.random.randint(next(keys), shape, 0, options.classes)
        * jax.random.bernoulli(next(keys), 0.01, shape)
        for shape in shapes
    ]
    boxes = [jax.random.normal(next(keys), (*shape, _BOX)) for shape in shapes]
    return {"images": jax.random.normal(images_key, image), "labels": labels, "boxes": boxes}


def model_flops(options: DetectorOptions) -> int:
    """FLOPs of a step's convolutions: three times those of a forward pass."""
    macs, channels, sizes = backbone_macs(options), backbone_channels(options), options.map_sizes
    widths = [channels]
    for (inner, outer, _), before, after in zip(options.layers, sizes, sizes[1:], strict=False):
        macs += before**2 * widths[-1] * inner + after**2 * 9 * inner * outer
        widths.append(outer)
    for width, size, anchors in zip(widths, sizes, options.anchors, strict=True):
        macs += size**2 * 9 * width * anchors * (options.classes + _BOX)
    return 6 * options.batch * macs
