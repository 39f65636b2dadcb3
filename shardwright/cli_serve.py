"""`shardwright serve`: runs the planning service."""

from __future__ import annotations

import errno
import logging
import socket
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal

import typer

from shardwright.cli_console import print_note
from shardwright.errors import InputError

_STREAMS_END_SECONDS = 10
_KEEP_ALIVE_SECONDS = 60
_BACKLOG = 2048
_LARGEST_HEAD_BYTES = 1 << 16
_SERVER_EXTRA = "pip install 'shardwright[server]'"


def serve(
    host: Annotated[
        str | None, typer.Option(help="Address to bind; others than loopback need keys.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port to bind; 0 takes a free one.")] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder of the embedded database and of files.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Jobs that run at once.")] = None,
    engine: Annotated[
        Literal["local", "ray"] | None,
        typer.Option(help="Where jobs run: processes of this machine, or a Ray cluster."),
    ] = None,
) -> None:
    """Runs the planning service: a REST API and pages.

    Every setting is a variable SHARDWRIGHT_... of the environment; options win over them. SIGTERM
    and Ctrl+C stop it: jobs that run go back to the queue and are done after the next start.
    """
    check_installed()
    from shardwright.api.app import create_app
    from shardwright.api.settings import load_settings

    options = {
        "host": host,
        "port": port,
        "data_dir": data_dir,
        "workers": workers,
        "engine": engine,
    }
    settings = load_settings(**{name: v for name, v in options.items() if v is not None})
    _check_address(settings.host, settings)
    with _bind(settings.host, settings.port) as listener:
        _log_to_stderr(settings.log_level)
        app = create_app(settings)
        address, port = listener.getsockname()[:2]
        shown = f"[{address}]" if ":" in address else address
        print_note(f"serving http://{shown}:{port}, data in {settings.data_dir}")
        _run(app, listener)


def check_installed() -> None:
    """Refuses where the packages of the service are not there.

    Raises:
      InputError: they are not.
    """
    try:
        import fastapi
        import sqlalchemy
        import uvicorn
    except ImportError as error:
        raise InputError(
            f"the service needs packages that are not installed ({error.name})",
            where="shardwright",
            do=f"Run {_SERVER_EXTRA}",
        ) from None
    del fastapi, sqlalchemy, uvicorn


def _log_to_stderr(level: str) -> None:
    logging.basicConfig(
        level=level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    # One line a request is what proxies log.
    logging.getLogger("uvicorn.access").setLevel(logging.WARNING)
    logging.getLogger("alembic").setLevel(logging.WARNING)


def _check_address(host: str, settings: Any) -> None:
    """Refuses an address that others reach while there are no keys."""
    from shardwright.api.access import is_loopback
    from shardwright.api.store import Store

    store = Store.open(settings)
    try:
        keyed = store.keys.any()
    finally:
        store.close()
    if not keyed and not is_loopback(host):
        raise InputError(
            f"{host} is not this machine's own address, and there are no keys: everybody who "
            "reaches it could use the service",
            where="serve --host",
            do="Make a key first with `shardwright keys create NAME`, or bind 127.0.0.1",
        )


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        used = error.errno == errno.EADDRINUSE
        raise InputError(
            f"the address cannot be bound ({error.strerror})",
            where=f"serve {host}:{port}",
            do="Give another --port" if used else "Give an address of this machine, as 127.0.0.1",
        ) from None
    return listener


def _run(app: Any, listener: socket.socket) -> None:
    import uvicorn
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class BoundedHeads(HttpToolsProtocol):
        """Ends requests whose line and headers are out of all proportion.

        The parser itself takes them however long they are, in time by the square of it.
        """

        in_head = False
        head_bytes = 0

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self.head_bytes = self.head_bytes + len(data) if self.in_head else 0
            if self.head_bytes > _LARGEST_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response("The headers are too long.")

        def on_message_begin(self) -> None:
            self.in_head = True
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self.in_head = False
            super().on_headers_complete()

    class Server(uvicorn.Server):
        """Ends streams of events when it is told to stop; it would wait for them otherwise."""

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            super().handle_exit(sig, frame)
            if self.started:
                app.state.context.hub.end_streams_soon()

    config = uvicorn.Config(
        app,
        http=BoundedHeads,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_STREAMS_END_SECONDS,
        backlog=_BACKLOG,
    )
    Server(config).run(sockets=[listener])
