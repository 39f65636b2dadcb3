"""Programs of libraries that people use, as they come: planned, run, one device's numbers.

Every argument is pinned to a sharding, so that the programs are really cut; at these sizes a free
plan would replicate most of them.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardwright as sw

MESH = {"x": 2, "y": 4}
Case = tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]


def normal(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(sum(shape)), shape)


def flax_nnx() -> Case:
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, width: int, rngs: Any) -> None:
            self.norm = nnx.LayerNorm(width, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs)
            self.up = nnx.Linear(width, 4 * width, rngs=rngs)
            self.down = nnx.Linear(4 * width, width, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            x = x + self.attention(self.norm(x))
            return x + self.down(nnx.gelu(self.up(x)))

    class Model(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.embedding = nnx.Embed(64, 32, rngs=rngs)
            self.block = Block(32, rngs)
            self.head = nnx.Linear(32, 64, rngs=rngs)

        def __call__(self, tokens: jax.Array) -> jax.Array:
            return self.head(self.block(self.embedding(tokens)))

    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(1e-2, momentum=0.9), wrt=nnx.Param)
    definition, state = nnx.split((model, optimizer))

    def loss_of(model: Model, tokens: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(
            model(tokens), jnp.roll(tokens, -1, 1)
        ).mean()

    def step(state: Any, tokens: jax.Array) -> Any:
        model, optimizer = nnx.merge(definition, state)
        loss, gradients = nnx.value_and_grad(loss_of)(model, tokens)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), loss

    return step, (state, jnp.arange(128).reshape(16, 8) % 64), (0,)


def flax_linen() -> Case:
    import flax.linen as nn

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Conv(16, (3, 3))(x)))
            x = nn.Conv(32, (3, 3))(nn.avg_pool(x, (2, 2), (2, 2)))
            return nn.Dense(10)(nn.relu(nn.GroupNorm(8)(x)).mean((1, 2)))

    model = Model()
    variables = model.init(jax.random.key(0), jnp.ones((8, 16, 16, 3)))
    optimizer = optax.sgd(0.1, momentum=0.9)
    state = (variables["params"], variables["batch_stats"], optimizer.init(variables["params"]))

    def step(state: Any, x: jax.Array, labels: jax.Array) -> Any:
        parameters, statistics, optimizer_state = state

        def loss_of(parameters: Any) -> Any:
            logits, updated = model.apply(
                {"params": parameters, "batch_stats": statistics}, x, mutable=["batch_stats"]
            )
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return losses.mean(), updated["batch_stats"]

        (loss, statistics), gradients = jax.value_and_grad(loss_of, has_aux=True)(parameters)
        updates, optimizer_state = optimizer.update(gradients, optimizer_state, parameters)
        return (optax.apply_updates(parameters, updates), statistics, optimizer_state), loss

    return step, (state, normal(16, 16, 16, 3), jnp.arange(16) % 10), (0,)


def equinox() -> Case:
    import equinox as eqx

    model = eqx.nn.MLP(16, 8, 32, 3, key=jax.random.key(0))
    parameters, static = eqx.partition(model, eqx.is_inexact_array)
    optimizer = optax.sgd(1e-2)

    def step(parameters: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        def loss_of(parameters: Any) -> jax.Array:
            return jnp.mean((jax.vmap(eqx.combine(parameters, static))(x) - y) ** 2)

        loss, gradients = jax.value_and_grad(loss_of)(parameters)
        updates, state = optimizer.update(gradients, state, parameters)
        return eqx.apply_updates(parameters, updates), state, loss

    return step, (parameters, optimizer.init(parameters), normal(64, 16), normal(64, 8)), (0, 1)


def haiku() -> Case:
    """An LSTM, unrolled in time, with a chain of clipping, Adam's scaling and a schedule."""
    import haiku as hk

    def forward(x: jax.Array) -> jax.Array:
        core = hk.LSTM(32)
        out, _ = hk.dynamic_unroll(core, x, core.initial_state(x.shape[1]))
        return hk.BatchApply(hk.Linear(8))(out)

    network = hk.without_apply_rng(hk.transform(forward))
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 5, 50)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(eps=1e-3),
        optax.scale_by_schedule(schedule),
        optax.scale(-1.0),
    )
    x = normal(6, 16, 16)
    parameters = network.init(jax.random.key(0), x)

    def step(parameters: Any, state: Any, x: jax.Array) -> Any:
        def loss_of(parameters: Any) -> jax.Array:
            return jnp.square(network.apply(parameters, x) - 1).mean()

        loss, gradients = jax.value_and_grad(loss_of)(parameters)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, loss

    return step, (parameters, optimizer.init(parameters), x), (0, 1)


def adafactor() -> Case:
    optimizer = optax.MultiSteps(optax.adafactor(1e-2, min_dim_size_to_factor=8), 4)
    parameters = {"w": normal(16, 32), "b": normal(32)}

    def step(parameters: Any, state: Any, x: jax.Array) -> Any:
        gradients = jax.grad(lambda p: jnp.square(x @ p["w"] + p["b"]).mean())(parameters)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state

    return step, (parameters, optimizer.init(parameters), normal(16, 16)), (0, 1)


def of(fn: Callable[..., Any], *args: Any) -> Callable[[], Case]:
    return lambda: (fn, args, ())


@jax.custom_vjp
def sine(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


sine.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),))


def recurrence(a: jax.Array, b: jax.Array) -> Any:
    def after(p: Any, q: Any) -> Any:
        return p[0] * q[0], p[1] * q[0] + q[1]

    return lax.associative_scan(after, (jax.nn.sigmoid(a), b), axis=1)


def convolution(x: jax.Array, k: jax.Array, **options: Any) -> jax.Array:
    numbers = ("NDHWC", "DHWIO", "NDHWC") if x.ndim == 5 else ("NHWC", "HWIO", "NHWC")
    ones = (1,) * (x.ndim - 2)
    return lax.conv_general_dilated(x, k, ones, "SAME", dimension_numbers=numbers, **options)


def transposed(k: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.square(lax.conv_transpose(x, k, (2, 2), "SAME")).sum()


def positive(x: jax.Array) -> jax.Array:
    return x @ jnp.swapaxes(x, -1, -2) + 9 * jnp.eye(x.shape[-1])


def nested(x: jax.Array, w: jax.Array) -> Any:
    def inner(c: jax.Array, w: jax.Array) -> Any:
        return jnp.tanh(c @ w), c.sum()

    return lax.scan(lambda c, w: lax.scan(inner, c, w), x, w)


def prints(x: jax.Array) -> jax.Array:
    y = x @ x.T
    jax.debug.print("norm {} of {}", jnp.linalg.norm(y), y[0])
    jax.debug.callback(lambda value: None, y)
    return jnp.tanh(y)


def checkpointed(w: jax.Array, x: jax.Array) -> jax.Array:
    policy = jax.checkpoint_policies.dots_saveable
    layer = jax.checkpoint(lambda x: jnp.sin(jnp.tanh(x @ w) @ w.T).sum(), policy=policy)
    return layer(x)


PROGRAMS: dict[str, Callable[[], Case]] = {
    "Flax NNX": flax_nnx,
    "Flax linen": flax_linen,
    "Equinox": equinox,
    "Haiku and an optax chain": haiku,
    "associative scan": of(recurrence, normal(8, 32, 16), normal(8, 32, 16)),
    "cumulative operations": of(
        lambda x: jnp.cumsum(x, 0) + lax.cumlogsumexp(x, 1) + lax.cummax(x, 0), normal(16, 32)
    ),
    "Fourier transform in two dimensions": of(
        lambda x: jnp.fft.ifft2(jnp.fft.fft2(x) * 2).real, normal(8, 16, 16)
    ),
    "complex numbers": of(
        lambda x, y: jnp.abs((x + 1j * y) @ (x - 1j * y).T), normal(16, 32), normal(16, 32)
    ),
    "sort of pairs": of(
        lambda x: lax.sort((x, lax.broadcasted_iota(jnp.int32, x.shape, 1)), dimension=1),
        normal(16, 32),
    ),
    "top k": of(lambda x: lax.top_k(x @ x.T, 4), normal(16, 32)),
    "approximate top k": of(lambda x: lax.approx_max_k(x @ x.T, 4), normal(16, 32)),
    "median": of(lambda x: jnp.median(x, axis=1), normal(16, 32)),
    "roll": of(lambda x: jnp.roll(x, 3, 0) + jnp.roll(x, 1, 1), normal(16, 32)),
    "transposed convolution": of(
        jax.grad(transposed), normal(3, 3, 8, 4), normal(8, 8, 8, 8)
    ),
    "convolution in three dimensions": of(
        convolution, normal(2, 8, 8, 8, 4), normal(3, 3, 3, 4, 8)
    ),
    "depthwise convolution": of(
        lambda x, k: convolution(x, k, feature_group_count=8), normal(8, 8, 8, 8),
        normal(3, 3, 1, 16),
    ),
    "dilated convolution": of(
        lambda x, k: convolution(x, k, rhs_dilation=(2, 2)), normal(8, 16, 8, 8),
        normal(3, 3, 8, 8),
    ),
    "resized image": of(
        lambda x: jax.image.resize(x, (8, 16, 16, 4), "bilinear"), normal(8, 8, 8, 4)
    ),
    "ragged dot": of(
        lax.ragged_dot, normal(32, 16), normal(4, 16, 8), jnp.array([8, 4, 12, 8], jnp.int32)
    ),
    "int8 dot": of(
        lambda a, b: jnp.dot(a, b, preferred_element_type=jnp.int32),
        jnp.ones((16, 32), jnp.int8), jnp.ones((32, 8), jnp.int8),
    ),
    "float8 dot": of(
        lambda a, b: jnp.dot(a.astype(jnp.float8_e4m3fn), b.astype(jnp.float8_e4m3fn)),
        normal(16, 32), normal(32, 8),
    ),
    "segment sum": of(
        lambda x, i: jax.ops.segment_sum(x, i, 8), normal(32, 16), jnp.arange(32) % 8
    ),
    "Cholesky, QR and a solve": of(
        lambda x, b: (jnp.linalg.cholesky(positive(x)), jnp.linalg.qr(x)[1],
                      jnp.linalg.solve(positive(x), b)),
        normal(8, 8, 8), normal(8, 8, 2),
    ),
    "singular values": of(lambda x: jnp.linalg.svd(x, compute_uv=False), normal(8, 8, 8)),
    "matrix exponential": of(lambda x: jax.scipy.linalg.expm(x * 0.1), normal(8, 8)),
    "custom gradient": of(jax.grad(lambda x: sine(x @ x.T).sum()), normal(16, 32)),
    "forward derivative": of(
        lambda x, t: jax.jvp(lambda y: jnp.tanh(y @ y.T), (x,), (t,))[1], normal(16, 32),
        normal(16, 32),
    ),
    "checkpoint with a policy": of(jax.grad(checkpointed), normal(16, 32), normal(8, 16)),
    "branches": of(
        lambda p, x: lax.cond(p, lambda y: y @ y.T, lambda y: (y @ y.T) * 2, x),
        jnp.array(True), normal(16, 32),
    ),
    "nested scans": of(nested, normal(16, 8), normal(3, 2, 8, 8)),
    "reversed, unrolled scan": of(
        lambda x: lax.scan(lambda c, y: (c * 0.5 + y, c), x[0], x, reverse=True, unroll=2),
        normal(8, 16),
    ),
    "loop that updates in place": of(
        lambda x: lax.fori_loop(0, 4, lambda i, c: c.at[i].set(c[i] * 2), x), normal(16, 32)
    ),
    "batched while": of(
        jax.vmap(lambda x: lax.while_loop(lambda c: c.sum() < 50, lambda c: c * 1.7 + 1, x)),
        jnp.abs(normal(16, 4)),
    ),
    "Newton's iteration until it converges": of(
        lambda x: lax.while_loop(lambda c: jnp.abs(c[0]).max() > 1e-2,
                                 lambda c: (c[0] * 0.5, c[1] + 1), (x, 0)),
        normal(16, 32),
    ),
    "gather and scatter out of bounds": of(
        lambda x, i, u: (jnp.take(x, i, axis=0, mode="fill"), jnp.take(x, i, axis=0, mode="clip"),
                         x.at[i].add(u, mode="drop")),
        normal(32, 16), jnp.array([0, 3, 5, 40, 2, 1, 7, 9], jnp.int32), normal(8, 16),
    ),
    "update of a slice at a place that is an argument": of(
        lambda x, u, i: lax.dynamic_update_slice(x, u, (i, jnp.int32(0))),
        normal(16, 32), normal(4, 32), jnp.int32(2),
    ),
    "einsum of many letters": of(
        lambda a, b, c: jnp.einsum("abcdef,cdg,efgh->abgh", a, b, c), normal(2, 2, 4, 4, 2, 4),
        normal(4, 4, 8), normal(2, 4, 8, 8),
    ),
    "sparse embedding and its update": of(
        lambda t, i, g: (t[i].sum(1), t.at[i.reshape(-1)].add(jnp.repeat(g, 4, 0))),
        normal(64, 16), jnp.arange(32).reshape(8, 4) * 2, normal(8, 16),
    ),
    "int4 weights inside": of(
        lambda a, b: a @ b.astype(jnp.int4).astype(jnp.float32), normal(16, 32),
        jnp.ones((32, 8), jnp.int8),
    ),
    "state with an empty leaf": of(
        lambda s, b: {"w": s["w"] - b.T @ (b @ s["w"]), "m": None, "count": s["count"] + 1},
        {"w": normal(32, 16), "m": None, "count": jnp.zeros((), jnp.int32)}, normal(16, 32),
    ),
    "jit of jit, with a static argument": of(
        jax.jit(lambda x: jax.jit(lambda y, n: (y @ y.T) * n, static_argnums=1)(x, 3)),
        normal(16, 32),
    ),
    "prints and a debugging callback": of(prints, normal(16, 32)),
    "vmap of a scan": of(
        jax.vmap(lambda x, w: lax.scan(lambda c, w: (jnp.tanh(c @ w), c.sum()), x, w),
                 in_axes=(0, None)),
        normal(8, 4, 16), normal(3, 16, 16),
    ),
    "sampled tokens": of(
        lambda d, x: jax.random.categorical(jax.random.wrap_key_data(d), x),
        jnp.zeros((2,), jnp.uint32), normal(16, 32),
    ),
    "random bits of the chip's own generator": of(
        lambda d, x: x * jax.random.normal(jax.random.wrap_key_data(d, impl="rbg"), x.shape) * 0,
        jnp.zeros((4,), jnp.uint32), normal(16, 32),
    ),
    "dropout of a key that is an argument": of(
        lambda k, x: jnp.where(jax.random.bernoulli(k, 0.5, x.shape), x @ x.T @ x, 0),
        jax.random.key(0), normal(16, 32),
    ),
    "keys of every row": of(
        jax.vmap(lambda k, row: row + jax.random.gumbel(jax.random.fold_in(k, 3), row.shape)),
        jax.random.split(jax.random.key(0), 16), normal(16, 32),
    ),
    "map in batches": of(
        lambda x: lax.map(lambda row: jnp.sin(row).sum(), x, batch_size=4), normal(16, 32)
    ),
    "sort by two of three": of(
        lambda a, b, c: lax.sort((a, b, c), num_keys=2, dimension=0),
        jnp.round(normal(16, 8)), normal(16, 8), normal(16, 8),
    ),
    "eigenvalues and their gradient": of(
        jax.value_and_grad(lambda x: jnp.linalg.eigh(positive(x))[0].max()), normal(8, 8, 8)
    ),
    "grouped, strided, dilated convolution's gradient": of(
        jax.grad(lambda k, x: jnp.square(
            lax.conv_general_dilated(
                x, k, (2, 2), "SAME", rhs_dilation=(2, 2), feature_group_count=4,
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
            )
        ).sum()),
        normal(3, 3, 2, 16), normal(8, 16, 16, 8),
    ),
    "dilated windows": of(
        lambda x: lax.reduce_window(
            x, 0.0, lax.add, (1, 3), (1, 1), ((0, 0), (1, 1)), (1, 2), (1, 2)
        ),
        normal(8, 16),
    ),
    "reduction of pairs by a function": of(
        lambda x: lax.reduce(
            (x, x * 2), (jnp.float32(0), jnp.float32(1)),
            lambda a, b: (a[0] + b[0], jnp.maximum(a[1], b[1])), (1,),
        ),
        normal(16, 8),
    ),
    "conjugate gradients": of(
        lambda x: jax.scipy.sparse.linalg.cg(
            lambda v: (x.T @ x + 9 * jnp.eye(8)) @ v, jnp.ones(8)
        )[0],
        normal(16, 8),
    ),
    "Adafactor every fourth step": adafactor,
    "uneven vocabulary": of(
        jax.grad(lambda w, t, x: jnp.square(w[t] @ w.T - x).mean()), normal(1257, 12),
        jnp.arange(24), normal(24, 1257),
    ),
}  # fmt: skip


def _pins(planned: sw.Plan, args: tuple[Any, ...]) -> dict[str, P]:
    """Each axis on the first dimension that it divides, of every argument."""
    pins = {}
    for tensor, leaf in zip(planned.data.program.inputs, jax.tree.leaves(args), strict=True):
        spec: list[str | None] = [None] * jnp.ndim(leaf)
        for axis, parts in MESH.items():
            for dim, size in enumerate(jnp.shape(leaf)):
                if spec[dim] is None and size and size % parts == 0:
                    spec[dim] = axis
                    break
        pins[tensor.path] = P(*spec)
    return pins


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_as_it_comes_runs_cut_with_the_numbers_of_one_device(name: str) -> None:
    fn, args, donate = PROGRAMS[name]()
    expected = jax.jit(fn)(*args)
    free = sw.plan(fn, *args, topology="v5e:2x4", mesh=MESH, donate_argnums=donate)
    cut = sw.plan(
        fn, *args, topology="v5e:2x4", mesh=MESH, donate_argnums=donate, pinned=_pins(free, args)
    )
    assert any(any(tensor.spec) for tensor in cut.data.program.inputs)
    found = cut.jit(fn)(*jax.tree.map(jnp.copy, args))
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(
            np.asarray(ours, np.float64), np.asarray(theirs, np.float64), rtol=2e-3, atol=2e-3
        )


def test_an_operation_that_cannot_be_cut_is_named_in_the_plan() -> None:
    fn, args, _ = PROGRAMS["ragged dot"]()
    plan = sw.plan(fn, *args, topology="v5e:2x4", mesh=MESH)
    assert any("ragged_dot" in op for op in plan.data.replicated_ops)


def test_what_a_compiled_program_cannot_take_or_tpus_have_not_is_told() -> None:
    def times(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ w.astype(jnp.float32)

    x, w = normal(16, 32), jnp.ones((32, 8), jnp.int4)
    plan = sw.plan(times, x, w, topology="v5e:2x4", mesh=MESH)
    with pytest.raises(sw.InputError, match=r"int4\[32,8\].* pass int8 and cast it inside"):
        plan.jit(times)(x, w)
    with pytest.raises(sw.InputError, match=r"has an operation that the platform has not.*'eig'"):
        sw.plan(jnp.linalg.eigvals, x[:, :16], topology="v5e:2x4")
