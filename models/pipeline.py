"""A loop over stacked layers as a pipeline: stages that work on different microbatches at once.

The stages are a dimension of arrays, not programs of their own. A buffer holds what every stage
works on; a step runs all stages, vectorised over that dimension, and shifts the buffer by one
stage. Where a mesh axis shards the dimension, the shift is one collective-permute a step. So a
pipeline is sharded as any other program is, and together with the other dimensions.

Source: Xu et al., GSPMD (2021), section 3.3 (the shifting buffer, circular repeats); Huang et al.,
  GPipe (2019), section 2.3 (microbatches, recomputation of stages).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from shardwright.errors import InputError

PyTree = Any
_WHERE = "pipeline"


def pipeline(
    layer: Callable[..., Any],
    params: PyTree,
    x: PyTree,
    *,
    stages: int,
    microbatches: int,
    repeats: int = 1,
    replicas: int = 1,
    remat: bool | Callable[..., bool] = False,
    has_aux: bool = False,
    key: jax.Array | None = None,
    stage_axis: str | None = None,
) -> Any:
    """Applies stacked layers one after the other, as `lax.scan` over them would, as a pipeline.

    Layer i gets `params` at i of their leading dimension. The batch is cut in `microbatches`; in
    each of microbatches x repeats + stages - 1 steps every stage applies its layers to one of them
    and hands it on. A share of (stages - 1) / (microbatches x repeats + stages - 1) of the work is
    done on copies of other microbatches and thrown away: the bubble.

    Args:
      layer: `layer(params, x) -> x` for one layer and one microbatch; what it returns has the
        structure, shapes and types of its `x`. With `key`, `layer(params, x, key)`; with
        `has_aux`, it returns `(x, aux)`.
      params: a pytree of arrays [layers, ...], in the order in which they are applied.
      x: a pytree of arrays [batch, ...]. Microbatch m is the examples at m, m + microbatches, ...:
        so a batch that is cut over devices stays where it is.
      stages: how many stages there are; stages x repeats divides the layers.
      microbatches: a divisor of the batch; a multiple of `stages` where there are repeats.
      repeats: how often a microbatch goes through all stages, meeting other layers each time. More
        of them make the bubble smaller, shift more often, and move the weights to their stages
        once a run, since a stage's layers are then not neighbours in `params`.
      replicas: parts of each microbatch that a copy of the weights each works on. Gradients of
        weights are added up over the copies once, after the last step, where without copies what
        shards the batch adds them up at every step. Give as many as there are devices that the
        batch is to be cut over; `layer` then gets such a part.
      remat: False keeps what the backward pass needs of every layer and step; True keeps what
        enters each stage and computes the stage again; a `jax.checkpoint` policy says what else
        to keep.
      has_aux: whether layers return something besides.
      key: a PRNG key, from which every layer gets a key of its own for each microbatch,
        `fold_in(fold_in(key, layer), microbatch)`, which is split for replicas.
      stage_axis: the mesh axis that the stages are sharded over, set with
        `with_sharding_constraint`; needs a mesh context. None leaves it to the planner.

    Returns:
      Like `x`; with `has_aux`, also a pytree of aux arrays [layers, microbatches, ...], or
      [layers, microbatches, replicas, ...] where there are several.

    Raises:
      InputError: sizes do not divide or disagree, or a layer changes the form of its `x`.
    """
    if not callable(layer):
        raise InputError(
            f"the layer is {layer!r}, and a function is wanted",
            where=_WHERE,
            do="Call pipeline(layer, params, x, ...), where layer(params_of_a_layer, x) returns x",
        )
    layers = _leading(params, "params")
    batch = _leading(x, "x")
    run = _Pipeline(layer, stages, microbatches, repeats, replicas, remat, has_aux, key, stage_axis)
    run.check(layers, batch)
    if replicas == 1:
        return run(params, x)
    copies = jax.tree.map(lambda leaf: _copied(leaf, replicas), params)
    parts = jax.tree.map(
        lambda leaf: jnp.swapaxes(leaf.reshape(replicas, -1, *leaf.shape[1:]), 0, 1), x
    )
    made = replace(run, layer=_on_copies(layer, replicas, has_aux))(copies, parts)
    out, aux = made if has_aux else (made, None)
    out = jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1).reshape(batch, *leaf.shape[2:]), out)
    return (out, aux) if has_aux else out


def _copied(leaf: jax.Array, replicas: int) -> jax.Array:
    return jnp.broadcast_to(leaf[:, None], (leaf.shape[0], replicas, *leaf.shape[1:]))


def _on_copies(layer: Callable[..., Any], replicas: int, has_aux: bool) -> Callable[..., Any]:
    """A layer of copied weights [replicas, ...] and examples [examples, replicas, ...]."""

    def each(params: PyTree, x: PyTree, *key: jax.Array) -> Any:
        keys = [jax.random.split(one, replicas) for one in key]
        axes = (0, 1, *[0] * len(keys))
        return jax.vmap(layer, in_axes=axes, out_axes=(1, 0) if has_aux else 1)(params, x, *keys)

    return each


@dataclass(frozen=True)
class _Pipeline:
    """The arguments of `pipeline`, checked by `check`.

    At step t, stage s works on visit t - s. Visits are numbered in groups of `stages` microbatches,
    which go through all repeats before the next group enters.
    """

    layer: Callable[..., Any]
    stages: int
    microbatches: int
    repeats: int
    replicas: int
    remat: bool | Callable[..., bool]
    has_aux: bool
    key: jax.Array | None
    stage_axis: str | None

    @property
    def visits(self) -> int:
        """How often something real enters a stage."""
        return self.microbatches * self.repeats

    def check(self, layers: int, batch: int) -> None:
        if self.stage_axis is not None and not isinstance(self.stage_axis, str):
            raise InputError(
                f"stage_axis={self.stage_axis!r} is not the name of a mesh axis",
                where=_WHERE,
                do='Give one such as "stage", or leave it out',
            )
        for name in ("stages", "microbatches", "repeats", "replicas"):
            count = getattr(self, name)
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise InputError(
                    f"{name}={count!r} is not a whole number above 0",
                    where=_WHERE,
                    do=f"Give {name} as 1 or more",
                )
        if layers % (self.stages * self.repeats):
            times = f" x repeats={self.repeats}" if self.repeats > 1 else ""
            raise InputError(
                f"stages={self.stages}{times} does not divide the {layers} layers",
                where=_WHERE,
                do="Every stage has as many layers: choose a divisor of the layers",
            )
        if batch % (self.microbatches * self.replicas):
            times = f" x replicas={self.replicas}" if self.replicas > 1 else ""
            raise InputError(
                f"microbatches={self.microbatches}{times} does not divide the batch of {batch}",
                where=_WHERE,
                do="Choose a divisor of the batch",
            )
        if self.repeats > 1 and self.microbatches % self.stages:
            raise InputError(
                f"microbatches={self.microbatches} is not a multiple of stages={self.stages}",
                where=_WHERE,
                do="With repeats, microbatches go around in groups of as many as there are stages",
            )

    def __call__(self, params: PyTree, x: PyTree) -> Any:
        weights = jax.tree.map(self._stack, params)
        parts = jax.tree.map(self._split, x)
        self._check_layer(params, parts)
        fed = jax.tree.map(self._feed, parts)
        # Steps of the bubble work on real examples, so that they give no NaN that a gradient would
        # multiply by 0.
        start = jax.tree.map(lambda part: self._all_stages(lax.stop_gradient(part[0])), parts)
        apply = self._apply
        if self.remat:
            policy = None if self.remat is True else self.remat
            # The loop around keeps XLA from undoing the recomputation.
            apply = jax.checkpoint(apply, policy=policy, prevent_cse=False)
        # So that the mask of each step is not kept for the backward pass.
        enter = jax.checkpoint(self._enter, prevent_cse=False)

        def step(made: PyTree, inputs: tuple[jax.Array, PyTree]) -> tuple[PyTree, Any]:
            number, entering = inputs
            taken = self._constrain(enter(number, entering, jax.tree.map(self._shift, made)), 0)
            made, aux = apply(weights, taken, number)
            made = self._constrain(made, 0)
            return made, (made, aux)

        numbers = lax.iota(jnp.int32, self.visits + self.stages - 1)
        _, (made, aux) = lax.scan(step, start, (numbers, fed))
        out = jax.tree.map(self._collect, self._constrain(made, 1))
        return (out, jax.tree.map(self._align, aux)) if self.has_aux else out

    def _check_layer(self, params: PyTree, parts: PyTree) -> None:
        """Raises where a layer does not return what the next one takes."""
        one, part = (
            jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), tree)
            for tree in (params, parts)
        )
        made = jax.eval_shape(self.layer, one, part, *([] if self.key is None else [self.key]))
        if self.has_aux:
            if not isinstance(made, tuple) or len(made) != 2:
                raise InputError(
                    "the layer does not return a pair, which has_aux=True asks for",
                    where=_WHERE,
                    do="Return (x, aux)",
                )
            made = made[0]
        same = len({jax.tree.structure(tree) for tree in (made, part)}) == 1 and all(
            (a.shape, a.dtype) == (b.shape, b.dtype)
            for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(part), strict=True)
        )
        if not same:
            raise InputError(
                f"the layer takes {_form(part)} and returns {_form(made)}",
                where=_WHERE,
                do="Return an x of the structure, shapes and types that the next layer takes",
            )

    def _stack(self, leaf: jax.Array) -> jax.Array:
        """Weights [layers, ...] as [layers of a stage, stages, ...], behind repeats if any."""
        inner = leaf.shape[1:]
        if self.repeats == 1:
            stacked = jnp.swapaxes(leaf.reshape(self.stages, -1, *inner), 0, 1)
            return self._cut(stacked, 1)
        stacked = leaf.reshape(self.repeats, self.stages, -1, *inner)
        return self._cut(jnp.swapaxes(stacked, 1, 2), 2)

    def _split(self, leaf: jax.Array) -> jax.Array:
        """A batch [batch, ...] as [microbatches, examples, ...]."""
        return jnp.swapaxes(leaf.reshape(-1, self.microbatches, *leaf.shape[1:]), 0, 1)

    def _feed(self, parts: jax.Array) -> jax.Array:
        """What enters at each step, [steps, stages, examples, ...]; only the first stage takes it.

        It has the dimension of the stages, so that the gradients of all steps are added up over it
        once, after the loop.
        """
        inner = parts.shape[1:]
        if self.repeats > 1:
            groups = parts.reshape(-1, 1, self.stages, *inner)
            times = (groups.shape[0], self.repeats, self.stages, *inner)
            parts = jnp.broadcast_to(groups, times).reshape(self.visits, *inner)
        rest = jnp.broadcast_to(lax.stop_gradient(parts[-1:]), (self.stages - 1, *inner))
        steps = jnp.concatenate([parts, rest])
        fed = jnp.broadcast_to(steps[:, None], (steps.shape[0], self.stages, *inner))
        return self._cut(fed, 1)

    def _all_stages(self, part: jax.Array) -> jax.Array:
        return self._cut(jnp.broadcast_to(part, (self.stages, *part.shape)), 0)

    def _enter(self, number: jax.Array, entering: PyTree, shifted: PyTree) -> PyTree:
        """What stages work on: a new microbatch at the first, in every other what was shifted."""
        new = (number // self.stages) % self.repeats == 0
        return jax.tree.map(
            lambda first, others: jnp.where(_at(others, 0) & new, first, others), entering, shifted
        )

    def _shift(self, made: jax.Array) -> jax.Array:
        """What a stage made at the next stage; with repeats, what the last made at the first."""
        if self.repeats > 1 and self.stages > 1:
            turned: jax.Array = jax.custom_derivatives.linear_call(
                lambda _, a: _roll(a, 1), lambda _, a: _roll(a, self.stages - 1), (), made
            )
            return turned
        if self.repeats > 1:
            return made
        ends = [(1, -1, 0)] + [(0, 0, 0)] * (made.ndim - 1)
        return lax.pad(made, jnp.zeros((), made.dtype), ends)

    def _apply(self, weights: PyTree, x: PyTree, number: jax.Array) -> tuple[PyTree, Any]:
        """All stages on what they hold, one layer of each after the other."""
        stage = lax.iota(jnp.int32, self.stages)
        visit = jnp.clip(number - stage, 0, self.visits - 1)
        turn, place = visit // self.stages, visit % self.stages
        repeat = turn % self.repeats
        if self.repeats > 1:
            weights = jax.tree.map(
                lambda leaf: jax.vmap(_of_repeat, in_axes=(2, 0), out_axes=1)(leaf, repeat), weights
            )
        depth = jax.tree.leaves(weights)[0].shape[0]
        first = (repeat * self.stages + stage) * depth
        microbatch = turn // self.repeats * self.stages + place

        def next_layer(x: PyTree, inputs: tuple[PyTree, jax.Array]) -> tuple[PyTree, Any]:
            one, index = inputs
            keys = () if self.key is None else (_keys(self.key, first + index, microbatch),)
            made = jax.vmap(self.layer)(one, x, *keys)
            return made if self.has_aux else (made, None)

        return lax.scan(next_layer, x, (weights, lax.iota(jnp.int32, depth)))

    def _collect(self, made: jax.Array) -> jax.Array:
        """What the last stage made in the last repeat, as [batch, ...]."""
        made = made[self.stages - 1 :]
        if self.repeats > 1:
            groups = made.reshape(-1, self.repeats, self.stages, *made.shape[1:])
            made = groups[:, -1].reshape(self.microbatches, *made.shape[1:])
        zero = jnp.zeros((), made.dtype)
        last = jnp.where(_at(made, self.stages - 1, axis=1), made, zero)
        # One term of each sum is not 0, so the type need not be a wider one.
        add = lax.bitwise_or if made.dtype == jnp.bool_ else lax.add
        parts = lax.reduce(last, zero, add, (1,))
        return jnp.swapaxes(parts, 0, 1).reshape(-1, *parts.shape[2:])

    def _align(self, aux: jax.Array) -> jax.Array:
        """What layers return besides, [steps, layers of a stage, stages, ...], in their order."""
        begin = lax.iota(jnp.int32, self.stages)
        take = functools.partial(lax.dynamic_slice_in_dim, slice_size=self.visits)
        visits = jax.vmap(take, in_axes=(2, 0), out_axes=2)(aux, begin)
        depth, inner = visits.shape[1], visits.shape[3:]
        shape = (-1, self.repeats, self.microbatches if self.repeats == 1 else self.stages)
        groups = visits.reshape(*shape, depth, self.stages, *inner)
        ordered = jnp.moveaxis(groups, (1, 4, 3, 0, 2), (0, 1, 2, 3, 4))
        return ordered.reshape(-1, self.microbatches, *inner)

    def _constrain(self, tree: PyTree, dim: int) -> PyTree:
        """Shards a dimension of every array as the stages are."""
        return jax.tree.map(lambda leaf: self._cut(leaf, dim), tree)

    def _cut(self, leaf: jax.Array, dim: int) -> jax.Array:
        if self.stage_axis is None:
            return leaf
        free = PartitionSpec.UNCONSTRAINED
        spec = [self.stage_axis if d == dim else free for d in range(leaf.ndim)]
        try:
            constrained: jax.Array = lax.with_sharding_constraint(leaf, PartitionSpec(*spec))
        except (RuntimeError, TypeError, ValueError) as error:  # no mesh, no such axis, no divisor
            reason = (str(error).splitlines() or [""])[0]
            raise InputError(
                f"stage_axis={self.stage_axis!r} cannot shard the stages: {reason[:300]}",
                where=_WHERE,
                do=f"Give mesh= with an axis {self.stage_axis}, whose size divides the "
                f"{self.stages} stages, to sw.plan or sw.evaluate; or leave stage_axis out",
            ) from error
        return constrained


def _of_repeat(leaf: jax.Array, repeat: jax.Array) -> jax.Array:
    one: jax.Array = lax.dynamic_index_in_dim(leaf, repeat, keepdims=False)
    return one


def _keys(key: jax.Array, layers: jax.Array, microbatches: jax.Array) -> jax.Array:
    """A key for each pair of a layer and a microbatch."""
    fold = jax.random.fold_in
    keys: jax.Array = jax.vmap(lambda i, m: fold(fold(key, i), m))(layers, microbatches)
    return keys


def _roll(x: jax.Array, by: int) -> jax.Array:
    """x with everything `by` places later, in the one form that is partitioned as one permute."""
    size = x.shape[0]
    ends = lax.slice_in_dim(x, size - by, size), lax.slice_in_dim(x, 0, size - by)
    return lax.concatenate(ends, 0)


def _at(x: jax.Array, index: int, axis: int = 0) -> jax.Array:
    """Where a dimension of x is at an index."""
    return lax.broadcasted_iota(jnp.int32, x.shape, axis) == index


def _leading(tree: PyTree, name: str) -> int:
    """The size of the leading dimension that all arrays of a tree share."""
    leaves = jax.tree.leaves(tree)
    sizes = sorted({leaf.shape[0] if jnp.ndim(leaf) else 0 for leaf in leaves})
    if len(sizes) != 1 or not sizes[0]:
        found = f"leading dimensions of {sizes}" if sizes else "no arrays"
        raise InputError(
            f"{name} has {found}",
            where=_WHERE,
            do="Its arrays share their leading dimension, which has one element or more",
        )
    return int(sizes[0])


def _form(tree: PyTree) -> str:
    return str(jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", tree))
