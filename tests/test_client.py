"""The client against a server whose every answer is scripted: errors, retries, broken streams."""

import json
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import anyio
import jax
import jax.numpy as jnp
import pytest

import shardwright as sw
from shardwright.planner.search import Progress

SHAPES = tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 32), (32, 16)))
PLAN = "pln_" + "a" * 26
PROBLEM = {"Content-Type": "application/problem+json"}
JSON = {"Content-Type": "application/json"}
EVENTS = {"Content-Type": "text/event-stream"}
KEY = "sw_abc_" + "s" * 43


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w)


@pytest.fixture(scope="module")
def plan() -> sw.Plan:
    return sw.plan(product, *SHAPES, topology="v5e:2x2", time_limit_s=300)


@dataclass(frozen=True)
class Reply:
    """What the server answers: a body, or pieces of a stream after which it hangs up."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=lambda: JSON)
    body: str = "{}"
    pieces: tuple[str, ...] | None = None
    silence_s: float = 0.0


def resource(status: str, **more: Any) -> str:
    return json.dumps({"id": PLAN, "status": status, "links": {}, "error": None, **more})


def event(number: int, name: str, data: dict[str, Any] | str) -> str:
    text = data if isinstance(data, str) else json.dumps(data)
    return f"id: {number}\nevent: {name}\ndata: {text}\n\n"


def progress(number: int, tried: int) -> str:
    told = {"stage": "search", "meshes_tried": tried, "meshes": 9, "best_step_s": 0.25, "gap": 0.1}
    return event(number, "progress", told)


class Service:
    """Answers each path with its replies in turn, the last of them for ever."""

    def __init__(self) -> None:
        self.replies: dict[str, list[Reply]] = {}
        self.asked: dict[str, list[dict[str, str]]] = defaultdict(list)
        self.bodies: dict[str, list[bytes]] = defaultdict(list)
        self.port = 0
        self._server: ThreadingHTTPServer | None = None
        self.start()

    def start(self) -> None:
        service = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                service.handle(self)

            do_GET = do_POST = do_DELETE = answer

            def log_message(self, *_: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: Any) -> None:
                pass  # clients that hang up early

        self._server = Server(("127.0.0.1", self.port), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def handle(self, http: BaseHTTPRequestHandler) -> None:
        name = f"{http.command} {http.path}"
        # Programs are named by what they hold; here one name stands for all.
        if name.startswith("GET /v1/programs/"):
            name = "GET /v1/programs"
        self.bodies[name].append(http.rfile.read(int(http.headers.get("Content-Length") or 0)))
        self.asked[name].append(dict(http.headers.items()))
        replies = self.replies.get(name, [Reply(404, PROBLEM, '{"what": "nothing here"}')])
        reply = replies.pop(0) if len(replies) > 1 else replies[0]
        time.sleep(reply.silence_s)
        http.send_response(reply.status)
        for key, value in reply.headers.items():
            http.send_header(key, value)
        if reply.pieces is None:
            http.send_header("Content-Length", str(len(reply.body.encode())))
        http.end_headers()
        for piece in reply.pieces or (reply.body,):
            http.wfile.write(piece.encode())
            http.wfile.flush()


@pytest.fixture
def service(plan: sw.Plan) -> Iterator[Service]:
    """A server that has the plan at once; tests change single answers."""
    scripted = Service()
    scripted.replies = {
        "POST /v1/programs": [Reply(201, JSON, json.dumps({"id": "f" * 64, "status": "ready"}))],
        "POST /v1/plans": [Reply(202, JSON, resource("queued"))],
        f"GET /v1/plans/{PLAN}": [Reply(200, JSON, resource("succeeded"))],
        f"DELETE /v1/plans/{PLAN}": [Reply(200, JSON, resource("cancelled"))],
        f"GET /v1/plans/{PLAN}/events": [
            Reply(200, EVENTS, pieces=(progress(1, 0), event(2, "done", resource("succeeded"))))
        ],
        f"GET /v1/plans/{PLAN}/plan.json": [Reply(200, JSON, plan.to_json())],
    }
    yield scripted
    scripted.stop()


Use = Callable[[Any], Any]


def blocking(url: str, use: Use, **options: Any) -> Any:
    with sw.Client(url, KEY, **options) as client:
        return use(client)


def asynchronous(url: str, use: Use, **options: Any) -> Any:
    async def run() -> Any:
        async with sw.AsyncClient(url, KEY, **options) as client:
            return await use(client)

    return anyio.run(run)


CLIENTS = {"blocking": blocking, "asynchronous": asynchronous}
both = pytest.mark.parametrize("call", CLIENTS.values(), ids=CLIENTS)


def make(client: Any, **options: Any) -> Any:
    return client.plan(product, *SHAPES, topology="v5e:2x2", **options)


@both
def test_plan_is_the_servers_with_the_pytrees_of_the_function(
    call: Any, service: Service, plan: sw.Plan
) -> None:
    made = call(service.url, make)
    assert made.data == plan.data
    assert made.in_specs == plan.in_specs
    body = json.loads(service.bodies["POST /v1/plans"][0])
    assert body["topology"] == "v5e:2x2" and body["program"] == "f" * 64
    headers = service.asked["POST /v1/plans"][0]
    assert headers["Authorization"] == f"Bearer {KEY}"


@both
def test_progress_is_told_as_a_local_plan_tells_it(call: Any, service: Service) -> None:
    told: list[Progress] = []
    call(service.url, lambda client: make(client, on_progress=told.append))
    assert told == [Progress("trace"), Progress("queue"), Progress("search", 0, 9, 0.25)]


@both
def test_plan_is_labelled_as_a_local_one(call: Any, service: Service) -> None:
    labels: dict[str, Any] = {"name": "mine", "tokens_per_step": 64, "model_flops": 1e9}
    local = sw.plan(product, *SHAPES, topology="v5e-4", time_limit_s=300, **labels)
    made = call(service.url, lambda c: c.plan(product, *SHAPES, topology="v5e-4", **labels))
    assert made.data.program == local.data.program
    assert made.estimate == local.estimate
    assert made.data.options.topology == "v5e-4"


@both
def test_program_that_the_server_has_is_not_sent_again(call: Any, service: Service) -> None:
    known = Reply(200, JSON, json.dumps({"id": "f" * 64, "status": "ready"}))
    service.replies["GET /v1/programs"] = [known]
    call(service.url, make)
    assert "POST /v1/programs" not in service.asked


@both
def test_reference_model_goes_by_name(call: Any, service: Service) -> None:
    call(
        service.url,
        lambda client: client.plan("mlp", options={"batch": 64}, topology="v5e:2x2", seed=3),
    )
    body = json.loads(service.bodies["POST /v1/plans"][0])
    assert body["model"] == {"name": "mlp", "options": {"batch": 64}} and body["seed"] == 3
    assert "program" not in body and "POST /v1/programs" not in service.asked


@both
def test_layouts_and_open_pins_are_sent(call: Any, service: Service) -> None:
    axes = {"*": ("rows", None)}
    open_pin = {"[1]": jax.sharding.PartitionSpec("x", jax.sharding.PartitionSpec.UNCONSTRAINED)}
    asked = {"layout": "named", "logical_axes": axes, "mesh": {"x": 4}, "pinned": open_pin}
    call(service.url, lambda client: client.plan("mlp", topology="v5e:2x2", **asked))
    body = json.loads(service.bodies["POST /v1/plans"][0])
    assert (body["layout"], body["logical_axes"]) == ("named", {"*": ["rows", None]})
    assert body["pinned"] == {"[1]": [["x"], ["?"]]}


def problem(status: int, **said: str) -> Reply:
    told = {"title": "t", "detail": "d", "status": status, **said}
    return Reply(status, PROBLEM, json.dumps(told))


REFUSALS: dict[str, tuple[Reply, type[sw.ShardwrightError], str]] = {
    "bad request": (
        problem(422, what="v5e:3x3 is no slice", where="topology", do="use v5e:4x4"),
        sw.InputError, r"^topology: v5e:3x3 is no slice\. Use v5e:4x4\.$",
    ),
    "too large": (
        problem(413, what="the program has 300 MB", where="upload", do="send less"),
        sw.InputError, "upload: the program has 300 MB. Send less",
    ),
    "wrong key": (
        problem(401, what="the key is not known", do="check it"),
        sw.ServiceError, "the key is not known. Check it",
    ),
    "key without the scope": (
        problem(403, what="the key may not plan"), sw.ServiceError, "may not plan.*Give an API key",
    ),
    "fault of the server": (
        problem(500, what="POST failed"), sw.ServiceError, "POST failed",
    ),
    "problem that says only its title": (
        Reply(400, PROBLEM, '{"title": "No"}'), sw.InputError, "v1/plans: No",
    ),
    "page of another program": (
        Reply(404, {"Content-Type": "text/html"}, "<h1>nginx</h1>"),
        sw.ServiceError, r"not a Shardwright server \(HTTP 404, text/html\).*shardwright serve",
    ),
    "success of another program": (
        Reply(200, {"Content-Type": "text/html"}, "<h1>welcome</h1>"),
        sw.ServiceError, "not a Shardwright server",
    ),
    "other JSON": (Reply(200, JSON, '["a"]'), sw.ServiceError, "answer is not understood"),
    "redirect": (
        Reply(307, {"Location": "https://elsewhere/"}),
        sw.ServiceError, "redirects to https://elsewhere/",
    ),
    "gateway": (
        Reply(502, {"Content-Type": "text/html"}), sw.ServiceError, "not available.*502",
    ),
}  # fmt: skip


@both
@pytest.mark.parametrize("name", REFUSALS)
def test_refusal_is_one_line_of_the_right_kind(call: Any, service: Service, name: str) -> None:
    reply, kind, message = REFUSALS[name]
    service.replies["POST /v1/plans"] = [reply]
    with pytest.raises(kind, match=message) as caught:
        call(service.url, make, patience_s=0)
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value) and KEY not in str(caught.value)


FAILURES: dict[str, tuple[dict[str, Any] | None, type[sw.ShardwrightError], str]] = {
    "input": (
        {"kind": "input", "what": "no argument [9]", "where": "pinned", "do": "use [0]"},
        sw.InputError, r"^pinned: no argument \[9\]\. Use \[0\]\.$",
    ),
    "does not fit": (
        {"kind": "does-not-fit", "what": "9 GB too much", "least_bytes": 25e9, "limit_bytes": 16e9},
        sw.DoesNotFitError, "9 GB too much",
    ),
    "crash": (
        {"kind": "crashed", "what": "signal 11", "where": "graph", "do": "report it"},
        sw.ServiceError, r"^graph: signal 11\. Report it\.$",
    ),
    "nothing said": (None, sw.ServiceError, f"{PLAN}: the server does not say why"),
}  # fmt: skip


@both
@pytest.mark.parametrize("name", FAILURES)
def test_failed_plan_raises_what_a_local_one_would(call: Any, service: Service, name: str) -> None:
    told, kind, message = FAILURES[name]
    failed = resource("failed", error=told)
    service.replies[f"GET /v1/plans/{PLAN}/events"] = [
        Reply(200, EVENTS, pieces=(event(1, "done", failed),))
    ]
    with pytest.raises(kind, match=message) as caught:
        call(service.url, make)
    if isinstance(caught.value, sw.DoesNotFitError):
        assert (caught.value.least_bytes, caught.value.limit_bytes) == (25e9, 16e9)
    if isinstance(caught.value, sw.ServiceError):
        assert caught.value.kind == (told["kind"] if told else "internal")


def test_plan_cancelled_by_others_is_told(service: Service) -> None:
    done = event(1, "done", resource("cancelled"))
    service.replies[f"GET /v1/plans/{PLAN}/events"] = [Reply(200, EVENTS, pieces=(done,))]
    with pytest.raises(sw.ServiceError, match=f"{PLAN}: it was cancelled") as caught:
        blocking(service.url, make)
    assert caught.value.kind == "cancelled"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@both
def test_server_that_was_never_there_is_told_at_once(call: Any) -> None:
    began = time.monotonic()
    with pytest.raises(sw.ServiceError, match=r"no server answers.*shardwright serve") as caught:
        call(f"http://127.0.0.1:{free_port()}", make, patience_s=600)
    assert time.monotonic() - began < 30
    assert caught.value.kind == "unreachable" and "\n" not in str(caught.value)


@both
def test_server_that_does_not_answer_in_time_is_told(call: Any, service: Service) -> None:
    service.replies["POST /v1/plans"] = [Reply(silence_s=1.5)]
    with pytest.raises(sw.ServiceError, match="did not answer in time"):
        call(service.url, make, timeout_s=0.3, patience_s=0)


@both
def test_what_speaks_no_http_is_told(call: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"220 mail.example.com ESMTP\r\n")
                connection.recv(4096)

        threading.Thread(target=greet, daemon=True).start()
        with pytest.raises(sw.ServiceError, match="the connection broke") as caught:
            call(f"http://127.0.0.1:{listener.getsockname()[1]}", make)
    assert "\n" not in str(caught.value)


@both
@pytest.mark.parametrize("status", [429, 503])
def test_busy_server_is_asked_again_after_the_time_it_names(
    call: Any, service: Service, status: int
) -> None:
    busy = Reply(status, PROBLEM | {"Retry-After": "1"}, '{"what": "the queue is full"}')
    service.replies["POST /v1/plans"].insert(0, busy)
    began = time.monotonic()
    call(service.url, make)
    assert time.monotonic() - began >= 1
    assert len(service.asked["POST /v1/plans"]) == 2


@both
def test_busy_server_that_names_a_time_too_far_is_told_at_once(call: Any, service: Service) -> None:
    busy = Reply(429, PROBLEM | {"Retry-After": "80000"}, '{"what": "the quota is used up"}')
    service.replies["POST /v1/plans"] = [busy]
    began = time.monotonic()
    with pytest.raises(sw.ServiceError, match="the quota is used up") as caught:
        call(service.url, make)
    assert time.monotonic() - began < 30
    assert caught.value.kind == "busy"


def test_retry_after_may_be_a_date(service: Service) -> None:
    late = "Fri, 31 Dec 2100 23:59:59 GMT"
    busy = Reply(503, PROBLEM | {"Retry-After": late}, '{"what": "closed for repairs"}')
    service.replies["POST /v1/plans"] = [busy]
    with pytest.raises(sw.ServiceError, match="closed for repairs"):
        blocking(service.url, make)
    assert len(service.asked["POST /v1/plans"]) == 1


@both
def test_broken_stream_goes_on_after_the_last_event(call: Any, service: Service) -> None:
    service.replies[f"GET /v1/plans/{PLAN}/events"] = [
        Reply(200, EVENTS, pieces=(progress(1, 1), progress(2, 2), "id: 3\nevent: progr")),
        Reply(200, EVENTS, pieces=(": still there\n\n", progress(3, 3))),
        Reply(200, EVENTS, pieces=(event(4, "done", resource("succeeded")),)),
    ]
    service.replies[f"GET /v1/plans/{PLAN}"] = [Reply(200, JSON, resource("running"))]
    told: list[Progress] = []
    call(service.url, lambda client: make(client, on_progress=told.append))
    assert [p.meshes_tried for p in told if p.stage == "search"] == [1, 2, 3]
    ids = [h.get("Last-Event-ID") for h in service.asked[f"GET /v1/plans/{PLAN}/events"]]
    assert ids == [None, "2", "3"]


@both
@pytest.mark.parametrize(
    "answer", [Reply(204, {}, ""), Reply(503, PROBLEM), Reply(200, EVENTS, pieces=("",))]
)
def test_plan_that_ended_unheard_is_fetched(call: Any, service: Service, answer: Reply) -> None:
    service.replies[f"GET /v1/plans/{PLAN}/events"] = [answer]
    assert call(service.url, make).data.topology == "v5e:2x2"


def test_events_that_are_none_are_told(service: Service) -> None:
    service.replies[f"GET /v1/plans/{PLAN}/events"] = [Reply(200, JSON, resource("running"))]
    with pytest.raises(sw.ServiceError, match="not a Shardwright server"):
        blocking(service.url, make)


@both
def test_server_may_restart_while_a_plan_is_followed(call: Any, service: Service) -> None:
    service.replies[f"GET /v1/plans/{PLAN}/events"].insert(
        0, Reply(200, EVENTS, pieces=(progress(1, 1),))
    )
    service.replies[f"GET /v1/plans/{PLAN}"] = [Reply(200, JSON, resource("running"))]

    def restart(told: Progress) -> None:
        if told.meshes_tried == 1:
            service.stop()
            threading.Timer(1.0, service.start).start()

    assert call(service.url, lambda client: make(client, on_progress=restart)) is not None


@both
def test_server_that_stays_away_is_told_with_the_plan_that_goes_on(
    call: Any, service: Service
) -> None:
    service.replies[f"GET /v1/plans/{PLAN}/events"] = [Reply(200, EVENTS, pieces=(progress(1, 1),))]

    def stop(told: Progress) -> None:
        if told.meshes_tried == 1:
            service.stop()

    with pytest.raises(sw.ServiceError, match=rf"no server answers.*Client.wait\('{PLAN}'\)"):
        call(service.url, lambda client: make(client, on_progress=stop), patience_s=1)


def interrupt(told: Progress) -> None:
    if told.stage == "search":
        raise KeyboardInterrupt


def test_interrupt_cancels_the_plan(service: Service) -> None:
    with pytest.raises(KeyboardInterrupt):
        blocking(service.url, lambda client: make(client, on_progress=interrupt))
    assert len(service.asked[f"DELETE /v1/plans/{PLAN}"]) == 1


def test_interrupt_cancels_what_is_open_of_a_comparison(service: Service) -> None:
    other = "pln_" + "b" * 26
    rows = [
        {"plan": PLAN, "topology": "v5e:2x2", "status": "succeeded"},
        {"plan": other, "topology": "v5e:2x4", "status": "running", "progress": {"stage": "graph"}},
    ]
    body = json.dumps({"id": "cmp_" + "a" * 26, "rows": rows})
    service.replies["POST /v1/comparisons"] = [Reply(202, JSON, body)]
    slices = []

    def interrupt(told: Any) -> None:
        slices.append(told.topology)
        if told.row is None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        blocking(
            service.url,
            lambda client: client.compare(
                product, *SHAPES, topologies=["v5e:2x2", "v5e:2x4"], on_progress=interrupt
            ),
        )
    assert slices == ["v5e:2x2", "v5e:2x4"]
    assert [name for name in service.asked if name.startswith("DELETE")] == [
        f"DELETE /v1/plans/{other}"
    ]


def test_interrupt_leaves_a_plan_that_others_wait_for(service: Service) -> None:
    service.replies["POST /v1/plans"] = [Reply(200, JSON, resource("running"))]
    with pytest.raises(KeyboardInterrupt):
        blocking(service.url, lambda client: make(client, on_progress=interrupt))
    assert f"DELETE /v1/plans/{PLAN}" not in service.asked


def test_cancelled_task_cancels_the_plan(service: Service) -> None:
    service.replies[f"GET /v1/plans/{PLAN}/events"] = [
        Reply(200, EVENTS, pieces=(progress(1, 1),)),
    ]
    service.replies[f"GET /v1/plans/{PLAN}"] = [Reply(200, JSON, resource("running"))]

    async def run() -> None:
        async with sw.AsyncClient(service.url) as client:
            with anyio.CancelScope() as scope:
                await make(client, on_progress=lambda told: told.meshes_tried and scope.cancel())
            assert scope.cancelled_caught

    anyio.run(run)
    assert len(service.asked[f"DELETE /v1/plans/{PLAN}"]) == 1


@both
def test_plan_of_another_program_is_refused(call: Any, service: Service) -> None:
    other = sw.plan(lambda x, w: jnp.cos(x @ w), *SHAPES, topology="v5e:2x2")
    service.replies[f"GET /v1/plans/{PLAN}/plan.json"] = [Reply(200, JSON, other.to_json())]
    with pytest.raises(sw.ServiceError, match=r"reads the program otherwise.*version of jax"):
        call(service.url, make)


@both
def test_submitted_plan_is_waited_for_later(call: Any, service: Service, plan: sw.Plan) -> None:
    job = call(service.url, lambda c: c.submit(product, *SHAPES, topology="v5e:2x2"))
    assert (job.id, job.status, job.finished) == (PLAN, "queued", False)
    assert call(service.url, lambda client: client.get(PLAN)).finished
    assert call(service.url, lambda client: client.wait(PLAN)).data == plan.data


@both
def test_list_asks_for_what_is_wanted(call: Any, service: Service) -> None:
    body = f'{{"items": [{resource("failed")}], "next_cursor": "n"}}'
    service.replies["GET /v1/plans?status=failed&cursor=c&limit=1"] = [Reply(200, JSON, body)]
    page = call(service.url, lambda client: client.list(status="failed", cursor="c", limit=1))
    assert [job.id for job in page.items] == [PLAN] and page.next_cursor == "n"


@both
def test_cancel_ends_a_plan(call: Any, service: Service) -> None:
    assert call(service.url, lambda client: client.cancel(PLAN)).status == "cancelled"


def test_ids_stay_in_their_place_in_the_path(service: Service) -> None:
    with pytest.raises(sw.InputError, match="nothing here"):
        blocking(service.url, lambda client: client.get("../keys?x=1"))
    assert list(service.asked) == ["GET /v1/plans/..%2Fkeys%3Fx%3D1"]


WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "slice": (lambda c: c.plan(product, *SHAPES, topology="v5e:3x3"), "v5e"),
    "fraction": (lambda c: make(c, memory_fraction=2.0), "memory_fraction is 2.0"),
    "pin without a mesh": (
        lambda c: make(c, pinned={"[0]": jax.sharding.PartitionSpec("x")}), "no mesh is given",
    ),
    "function that does not trace": (
        lambda c: c.plan(product, SHAPES[0], SHAPES[0], topology="v5e:2x2"), "does not trace",
    ),
    "options of a function": (lambda c: make(c, options={"batch": 1}), "of a reference model"),
    "arguments of a model": (
        lambda c: c.plan("mlp", 1, topology="v5e:2x2"), "its own arguments",
    ),
    "refinement": (lambda c: make(c, refine=2), "a server compiles nothing"),
    "variants": (lambda c: make(c, variants={}), "one program at a time"),
}  # fmt: skip


@both
@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_told_before_anything_is_sent(
    call: Any, service: Service, name: str
) -> None:
    use, message = WRONG[name]
    with pytest.raises(sw.InputError, match=message):
        call(service.url, use)
    assert not service.asked


@pytest.mark.parametrize(
    "url", ["planner.example.com", "ftp://planner", "http://", "http://a b", "http://h/?a=1", ""]
)
def test_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(sw.InputError, match="is not the URL of a server"):
        sw.Client(url)


def test_password_in_the_url_is_refused_without_being_shown() -> None:
    with pytest.raises(sw.InputError, match="Give an API key") as caught:
        sw.Client("http://ada:secret@planner.example.com")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("key", ["", "  ", "a\nb", "schlüssel"])
def test_key_that_is_none_is_refused_without_being_shown(key: str) -> None:
    with pytest.raises(sw.InputError, match="this cannot be an API key") as caught:
        sw.Client("http://127.0.0.1:1", key)
    assert not key.strip() or key not in str(caught.value)


def test_server_may_be_behind_a_path(service: Service) -> None:
    service.replies[f"GET /planner/v1/plans/{PLAN}"] = [Reply(200, JSON, resource("running"))]
    assert blocking(f"{service.url}/planner/", lambda client: client.get(PLAN)).status == "running"
