"""Flash attention: JAX's own Pallas TPU kernels, forward and backward, as planned kernels.

On TPU the kernels of `jax.experimental.pallas.ops.tpu.splash_attention` run, which never write
the attention scores to memory and skip the masked blocks of a causal mask; elsewhere plain JAX.
"""

from __future__ import annotations

import functools
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from shardwright.errors import InputError
from shardwright.models.transformer_options import FLASH_LENGTH
from shardwright.planner.kernels import Kernel, kernel

BLOCK = 512
"""Rows of queries and of keys that a step of the kernels works on, where the length allows.

Source: AI-Hypercomputer/maxtext, configs/base.yml, `sa_block_q` and `sa_block_kv`.
"""

_SUBLANES = 8
_RULE = "b (k g) t d, b k s d, b k s d"


def flash_attention(q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool = True) -> jax.Array:
    """Softmax attention that is planned as one kernel, and its gradient as another.

    Query head i reads key head i // (heads / kv_heads). Batch and heads can be sharded; without a
    causal mask the queries' positions too. The softmax is taken in float32.

    Args:
      q: [batch, queries, heads, head_dim].
      k: [batch, keys, kv_heads, head_dim].
      v: like `k`.
      causal: attend to positions up to one's own; queries and keys are then as many.

    Returns:
      Like `q`.

    Raises:
      InputError: the shapes do not go together.

    Source: Dao et al., FlashAttention (2022), algorithms 1 and 4; Ainslie et al., GQA (2023).
    """
    _check(q, k, v, causal)
    # Scaled outside, where it joins what makes the queries.
    scaled = q * jnp.asarray(q.shape[-1] ** -0.5, q.dtype)
    heads_first = [jnp.swapaxes(x, 1, 2) for x in (scaled, k, v)]
    mixed: jax.Array = _attention(causal, *heads_first)
    return jnp.swapaxes(mixed, 1, 2)


def _check(q: jax.Array, k: jax.Array, v: jax.Array, causal: bool) -> None:
    wrong = ""
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape:
        wrong = "queries, keys and values of four dimensions are wanted, keys like values"
    elif (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]) or q.shape[2] % k.shape[2]:
        wrong = "batch and head_dim must agree, and kv_heads divide heads"
    elif causal and q.shape[1] != k.shape[1]:
        wrong = "a causal mask needs as many keys as queries"
    elif q.shape[1] % FLASH_LENGTH or k.shape[1] % FLASH_LENGTH:
        wrong = f"the kernels need lengths that are multiples of {FLASH_LENGTH}"
    if wrong:
        raise InputError(
            f"{wrong}: q is {q.shape}, k {k.shape}, v {v.shape}",
            where="flash_attention",
            do="Reshape or pad them, or use plain attention",
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(causal: bool, q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    mixed, _ = _kernels(causal, q.dtype.itemsize)[0](q, k, v)
    return mixed


def _forward(causal: bool, q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    mixed, log_sum = _kernels(causal, q.dtype.itemsize)[0](q, k, v)
    mixed, log_sum = checkpoint_name(mixed, "context"), checkpoint_name(log_sum, "context")
    return mixed, (q, k, v, mixed, log_sum)


def _backward(causal: bool, saved: Any, gradient: jax.Array) -> Any:
    return _kernels(causal, gradient.dtype.itemsize)[1](*saved, gradient)


_attention.defvjp(_forward, _backward)


@functools.cache
def _kernels(causal: bool, itemsize: int) -> tuple[Kernel, Kernel]:
    """The forward and the backward kernel.

    FLOPs: 2 products [t, d] x [d, s] a head forward; backward 7, as the scores are computed again
    both for the gradient of the queries and for that of keys and values. head_dim is padded to
    the matrix unit. A causal mask skips the blocks above the diagonal. HBM: what a block of
    queries needs of keys and values is read again for each block, and the other way round; the
    sums of exponentials are written in all lanes of a register, as float32, and read back by the
    gradient's kernels in all sublanes, with the products of results and their gradients.

    Source: jax/experimental/pallas/ops/tpu/splash_attention/splash_attention_kernel.py (grids,
      block specs and output shapes of the forward, dq and dkv kernels).
    """
    part = f"((t + min({BLOCK}, t)) / (2 * t))" if causal else "1"
    pair = f"2 * b * k * g * t * s * ceil(d / mxu) * mxu * {part}"
    queries, sums = f"b * k * g * t * d * {itemsize}", f"b * k * g * t * {FLASH_LENGTH} * 4"
    keys = f"b * k * g * s * d * {itemsize}"
    keys_again = f"2 * {keys} * ceil(t / {BLOCK}) * {part}"
    queries_again = f"2 * {queries} * ceil(s / {BLOCK}) * {part}"
    forward = kernel(
        functools.partial(_splash_forward, causal),
        reference=functools.partial(_plain_forward, causal),
        rule=f"{_RULE} -> b (k g) t d, b (k g) t",
        whole="t" if causal else "",
        flops=f"2 * {pair}",
        hbm_bytes=f"2 * {queries} + {keys_again} + 2 * {sums}",
        temp_bytes=sums,
        name="flash_attention",
    )
    gradients = f"{queries} + 2 * {keys}"
    backward = kernel(
        functools.partial(_splash_backward, causal),
        reference=functools.partial(_plain_backward, causal),
        rule=f"{_RULE}, b (k g) t d, b (k g) t, b (k g) t d -> {_RULE}",
        whole="d",
        flops=f"7 * {pair}",
        hbm_bytes=f"4 * {queries} + {keys_again} + 2 * {keys} + {queries_again} + {gradients}",
        temp_bytes=f"4 * b * k * g * t * {_SUBLANES} * 4",
        name="flash_attention_gradient",
    )
    return forward, backward


# -- on TPU --------------------------------------------------------------------------------------


def _splash(causal: bool, q: jax.Array, k: jax.Array, *, save: bool) -> Any:
    """JAX's kernel for one sequence [heads, length, head_dim] of the local shapes."""
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel,
        splash_attention_mask,
    )

    heads, queries, keys = q.shape[1], q.shape[2], k.shape[2]
    block_q, block_k = gcd(queries, BLOCK), gcd(keys, BLOCK)
    shape = (queries, keys)
    mask = (
        splash_attention_mask.CausalMask(shape) if causal else splash_attention_mask.FullMask(shape)
    )
    return splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask([mask] * heads),
        head_shards=1,
        q_seq_shards=1,
        save_residuals=save,
        block_sizes=splash_attention_kernel.BlockSizes(
            block_q=block_q,
            block_kv=block_k,
            block_q_dkv=block_q,
            block_kv_dkv=block_k,
            block_q_dq=block_q,
            block_kv_dq=block_k,
        ),
    )


def _splash_forward(causal: bool, q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    attend = _splash(causal, q, k, save=True)
    mixed, (log_sum,) = jax.vmap(attend)(q, k, v)
    return mixed, log_sum


def _splash_backward(
    causal: bool,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mixed: jax.Array,
    log_sum: jax.Array,
    gradient: jax.Array,
) -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

    attend = _splash(causal, q, k, save=False)

    def one(*arrays: jax.Array) -> Any:
        q, k, v, mixed, log_sum, gradient = arrays
        saved = (q, k, v, None, None, mixed, log_sum, attend.dq_mask_info, attend.dkv_mask_info)
        gradients = splash_attention_kernel._splash_attention_bwd(
            res=saved, do=gradient, **attend.kwargs
        )
        return gradients[3:6]

    return jax.vmap(one)(q, k, v, mixed, log_sum, gradient)


# -- elsewhere -----------------------------------------------------------------------------------


def _scores(causal: bool, q: jax.Array, k: jax.Array) -> jax.Array:
    """Scores [batch, kv_heads, group, queries, keys] in float32; masked ones are -inf."""
    scores = jnp.einsum("bkgtd,bksd->bkgts", q, k).astype(jnp.float32)
    if not causal:
        return scores
    shape = scores.shape[-2:]
    visible = jax.lax.broadcasted_iota(jnp.int32, shape, 0) >= jax.lax.broadcasted_iota(
        jnp.int32, shape, 1
    )
    return jnp.where(visible, scores, -jnp.inf)


def _grouped(x: jax.Array, kv_heads: int) -> jax.Array:
    """Query heads as [kv_heads, heads / kv_heads]."""
    return x.reshape(x.shape[0], kv_heads, -1, *x.shape[2:])


def _plain_forward(causal: bool, q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    scores = _scores(causal, _grouped(q, k.shape[1]), k)
    log_sum = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - log_sum[..., None]).astype(v.dtype)
    mixed = jnp.einsum("bkgts,bksd->bkgtd", weights, v).astype(q.dtype)
    return mixed.reshape(q.shape), log_sum.reshape(q.shape[:3])


def _plain_backward(
    causal: bool,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mixed: jax.Array,
    log_sum: jax.Array,
    gradient: jax.Array,
) -> Any:
    """Source: Dao et al., FlashAttention (2022), appendix B.2."""
    kv_heads = k.shape[1]
    queries, out, d_out = (_grouped(x, kv_heads) for x in (q, mixed, gradient))
    scores = _scores(causal, queries, k)
    weights = jnp.exp(scores - _grouped(log_sum, kv_heads)[..., None])
    d_weights = jnp.einsum("bkgtd,bksd->bkgts", d_out, v).astype(jnp.float32)
    spread = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
    d_scores = (weights * (d_weights - spread[..., None])).astype(q.dtype)
    d_q = jnp.einsum("bkgts,bksd->bkgtd", d_scores, k).reshape(q.shape)
    d_k = jnp.einsum("bkgts,bkgtd->bksd", d_scores, queries)
    d_v = jnp.einsum("bkgts,bkgtd->bksd", weights.astype(v.dtype), d_out)
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype)
