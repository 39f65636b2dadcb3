"""The client and a real server: a train step goes up, its plan comes back and runs."""

import threading
import time
from collections.abc import Callable
from typing import Any

import anyio
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from service_fixtures import Service

import shardwright as sw
from shardwright.models import build
from shardwright.planner.search import Progress

MESH = {"data": 2, "model": 4}
DECODER = {
    "layers": 2, "d_model": 32, "heads": 4, "kv_heads": 2, "d_ff": 64, "vocab": 64, "batch": 8,
    "sequence": 16, "compute_dtype": "float32", "learning_rate": 1e-2,
}  # fmt: skip
ENOUGH_S = 300.0
"""So that the search ends by itself and finds the same however busy the machine is."""
PINNED = {"[0]['params']['layers']['w_up']": P(None, "data", "model")}


def ask(client: Any, **options: Any) -> Any:
    """A plan of a scanned decoder with optax state; a seed of its own makes it a new one."""
    model = build("llama3-8b", **DECODER)
    return client.plan(
        model.train_step, *model.example_args, topology="v5e:2x4", mesh=MESH,
        donate_argnums=model.donate_argnums, pinned=PINNED, time_limit_s=ENOUGH_S, **options,
    )  # fmt: skip


def check_it_trains_as_one_device_does(plan: sw.Plan) -> None:
    model = build("llama3-8b", **DECODER)
    step, one_device = plan.jit(model.train_step), jax.jit(model.train_step)
    state, alone = model.init(0), model.init(0)
    for number in range(3):
        batch = model.make_batch(number)
        state, metrics = step(state, batch)
        alone, expected = one_device(alone, batch)
        np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-5)
    for ours, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def local() -> sw.Plan:
    model = build("llama3-8b", **DECODER)
    return sw.plan(
        model.train_step, *model.example_args, topology="v5e:2x4", mesh=MESH,
        donate_argnums=model.donate_argnums, pinned=PINNED, time_limit_s=ENOUGH_S,
    )  # fmt: skip


def without_times(plan: sw.Plan) -> dict[str, Any]:
    return plan.data.model_dump(exclude={"solver": {"wall_time_s"}, "program": {"origin", "unit"}})


def test_plan_of_the_server_is_the_local_one_and_trains(service: Service, local: sw.Plan) -> None:
    told: list[Progress] = []
    with sw.Client(service.url) as client:
        plan = ask(client, on_progress=told.append)
    assert without_times(plan) == without_times(local)
    assert plan.in_specs == local.in_specs and plan.out_specs == local.out_specs
    assert told[0] == Progress("trace")
    assert any(progress.stage == "search" and progress.meshes for progress in told)
    check_it_trains_as_one_device_does(plan)


def test_plan_through_postgres_and_ray_is_the_local_one_and_trains(
    service_factory: Callable[..., Service], postgres_url: str, ray_address: str, local: sw.Plan
) -> None:
    service = service_factory(
        SHARDWRIGHT_DATABASE_URL=postgres_url,
        SHARDWRIGHT_ENGINE="ray",
        SHARDWRIGHT_RAY_ADDRESS=ray_address,
    )
    with sw.Client(service.url) as client:
        plan = ask(client)
    assert without_times(plan) == without_times(local)
    check_it_trains_as_one_device_does(plan)
    service.stop()
    assert "Traceback" not in service.log


def test_asynchronous_client_gets_the_same_plan(service: Service, local: sw.Plan) -> None:
    async def run() -> Any:
        async with sw.AsyncClient(service.url) as client:
            return await ask(client)

    assert without_times(anyio.run(run)) == without_times(local)


def test_same_request_again_is_answered_from_the_store(service: Service) -> None:
    with sw.Client(service.url) as client:
        ask(client)
        before = client.list(limit=100).items
        began = time.monotonic()
        plan = ask(client)
        assert client.list(limit=100).items == before
    assert plan.data.topology == "v5e:2x4" and time.monotonic() - began < 30


def descend(state: dict[str, jax.Array], batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    gradient = jax.grad(lambda w: jnp.tanh(batch["x"] @ w).var())(state["w"])
    return {"w": state["w"] - 0.1 * gradient}


def test_exported_artifact_is_planned_with_its_paths(service: Service) -> None:
    state = {"w": jax.ShapeDtypeStruct((64, 32), np.float32)}
    batch = {"x": jax.ShapeDtypeStruct((16, 64), np.float32)}
    exported = jax.export.export(jax.jit(descend, donate_argnums=0), platforms=["tpu"])
    program = sw.Program.from_exported(bytes(exported(state, batch).serialize()))
    with sw.Client(service.url) as client:
        plan = client.plan(program, topology="v5e:2x2", mesh={"data": 4})
    assert [t.path for t in plan.data.program.inputs] == ["[0]['w']", "[1]['x']"]
    assert plan.data.program.aliases == [(0, 0)]
    assert plan.in_specs[1].keys() == batch.keys()


def test_reference_model_by_name_is_the_local_plan(service: Service) -> None:
    options = {"features": 256, "hidden": 512, "layers": 2, "classes": 64, "batch": 1024}
    model = build("mlp", **options)
    local = sw.plan(
        model.train_step, *model.example_args, topology="v5e:2x2", name="mlp",
        donate_argnums=model.donate_argnums, tokens_per_step=model.tokens_per_step,
        model_flops=float(model.model_flops_per_step), time_limit_s=ENOUGH_S,
    )  # fmt: skip
    with sw.Client(service.url) as client:
        plan = client.plan("mlp", options=options, topology="v5e:2x2", time_limit_s=ENOUGH_S)
    assert without_times(plan) == without_times(local)
    assert plan.data.program.origin is not None and plan.data.program.origin.target == "mlp"
    assert plan.data.program.unit == "examples"


def test_price_of_a_sharding_is_the_local_one(service: Service) -> None:
    shapes = tuple(jax.ShapeDtypeStruct(s, np.float32) for s in ((64, 32), (16, 64)))

    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return w - x.T @ jnp.tanh(x @ w), (x @ w).sum()

    options: dict[str, Any] = {
        "topology": "v5e:2x2", "mesh": {"data": 4}, "in_specs": (P("data"), None),
        "out_specs": (P(), P()), "donate_argnums": 0, "model_flops": 1e9,
    }  # fmt: skip
    with sw.Client(service.url) as client:
        assert client.evaluate(step, *shapes, **options) == sw.evaluate(step, *shapes, **options)
        with pytest.raises(sw.InputError, match=r"'model' of .* is not in the mesh"):
            client.evaluate(step, *shapes, **options | {"in_specs": P("model")})


def test_price_of_a_models_sharding_by_patterns(service: Service) -> None:
    model = build("mlp")
    specs = jax.tree.map(lambda _: P(), model.example_args)
    specs = (specs[0], jax.tree.map(lambda _: P("data"), specs[1]))
    local = sw.evaluate(
        model.train_step, *model.example_args, topology="v5e:2x2", mesh={"data": 4},
        in_specs=specs, donate_argnums=model.donate_argnums,
        model_flops=model.model_flops_per_step,
    )  # fmt: skip
    with sw.Client(service.url) as client:
        told = client.evaluate(
            "mlp", topology="v5e:2x2", mesh={"data": 4}, in_specs={"[1]*": P("data")}
        )
    assert told == local


def test_comparison_of_slices_is_the_local_one(service: Service) -> None:
    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return w - x.T @ jnp.tanh(x @ w), (x @ w).sum()

    side = 70_000  # 19.6 GB, which one chip of v5e does not hold
    shapes = tuple(jax.ShapeDtypeStruct(s, np.float32) for s in ((side, side), (1, side)))
    options: dict[str, Any] = {
        "topologies": ["v5e:1x1", "v5p:2x2x1"], "tokens_per_step": 64, "model_flops": 1e12,
        "donate_argnums": 0, "time_limit_s": ENOUGH_S,
    }  # fmt: skip
    done = []
    with sw.Client(service.url) as client:
        told = client.compare(
            step, *shapes, **options, on_progress=lambda p: p.row and done.append(p.topology)
        )
    local = sw.compare(step, *shapes, **options)
    assert [row.status for row in told.rows] == ["does-not-fit", "planned"]
    assert told.data == local.data
    assert sorted(done) == ["v5e:1x1", "v5p:2x2x1"]
    assert told.plans["v5p:2x2x1"].in_specs == local.plans["v5p:2x2x1"].in_specs


def test_wrong_pin_of_a_model_is_the_servers_input_error(service: Service) -> None:
    with (
        sw.Client(service.url) as client,
        pytest.raises(sw.InputError, match=r"no argument .*nowhere"),
    ):
        client.plan("mlp", topology="v5e:2x2", mesh={"data": 4}, pinned={"nowhere": P("data")})


def test_program_that_does_not_fit_is_told_as_a_local_plan_tells_it(service: Service) -> None:
    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return w * 2 + (x @ w).sum(), x

    shapes = (jax.ShapeDtypeStruct((1 << 17, 1 << 17), np.float32),) * 2
    with pytest.raises(sw.DoesNotFitError) as local:
        sw.plan(step, *shapes, topology="v5e:2x2")
    with sw.Client(service.url) as client, pytest.raises(sw.DoesNotFitError) as remote:
        client.plan(step, *shapes, topology="v5e:2x2")
    assert str(remote.value) == str(local.value)


def slow(client: Any, seed: int, **options: Any) -> Any:
    """A plan that takes many seconds: a large model on many meshes."""
    return client.plan(
        "llama3-8b", options={"layers": 8, "scan_layers": False}, topology="v5p:8x8x8",
        time_limit_s=300.0, seed=seed, **options,
    )  # fmt: skip


def test_interrupt_cancels_the_job_on_the_server(service: Service) -> None:
    def interrupt(told: Progress) -> None:
        if told.stage != "trace":
            raise KeyboardInterrupt

    with sw.Client(service.url) as client:
        with pytest.raises(KeyboardInterrupt):
            slow(client, 1, on_progress=interrupt)
        assert client.list(limit=1).items[0].status == "cancelled"


def cancel(url: str, plan_id: str) -> None:
    with sw.Client(url) as client:
        client.cancel(plan_id)


def test_plan_that_somebody_cancels_raises(service: Service) -> None:
    with sw.Client(service.url) as client:
        job = client.submit(
            "llama3-8b", options={"layers": 8, "scan_layers": False}, topology="v5p:8x8x8", seed=2
        )
        timer = threading.Timer(1.0, cancel, (service.url, job.id))
        timer.start()
        with pytest.raises(sw.ServiceError, match="it was cancelled") as caught:
            client.wait(job.id)
        timer.join()
    assert caught.value.kind == "cancelled"


def test_server_that_is_killed_and_started_again_while_followed_still_gives_the_plan(
    service_factory: Callable[..., Service], local: sw.Plan
) -> None:
    service = service_factory()

    def kill(told: Progress) -> None:
        if told.stage not in ("trace", "queue") and not killed:
            killed.append(True)
            service.kill()
            service.start()

    killed: list[bool] = []
    with sw.Client(service.url) as client:
        plan = ask(client, on_progress=kill)
    assert killed
    assert without_times(plan) == without_times(local)


@pytest.fixture(scope="module")
def keys(service_factory: Callable[..., Service]) -> tuple[str, str, str]:
    """A server with keys: its URL, a key that may plan, and one that may read."""
    service = service_factory(started=False)
    made = service.make_key("ada"), service.make_key("reader", "--scope", "read")
    service.start()
    return service.url, *made


def test_keys_are_needed_where_there_are_keys(keys: tuple[str, str, str]) -> None:
    url, key, _ = keys
    with sw.Client(url, key) as client:
        assert client.list().items == []
    for wrong in (None, key[:-4] + "aaaa", "sw_x_y"):
        with sw.Client(url, wrong) as client, pytest.raises(sw.ServiceError) as caught:
            client.list()
        assert caught.value.kind == "unauthorized"
        assert key not in str(caught.value) and "\n" not in str(caught.value)


def test_key_that_may_only_read_cannot_plan(keys: tuple[str, str, str]) -> None:
    url, _, reader = keys
    with sw.Client(url, reader) as client, pytest.raises(sw.ServiceError) as caught:
        ask(client)
    assert caught.value.kind == "unauthorized"


def test_plans_of_other_keys_are_not_there(keys: tuple[str, str, str]) -> None:
    url, key, reader = keys
    with sw.Client(url, key) as client:
        job = client.submit("mlp", topology="v5e:2x2", time_limit_s=0.1)
    with sw.Client(url, reader) as client:
        assert client.list().items == []
        with pytest.raises(sw.InputError, match=f"there is no plan {job.id}"):
            client.get(job.id)
