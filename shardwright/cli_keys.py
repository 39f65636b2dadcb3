"""`shardwright keys`: who may use the planning service."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwright.cli_console import print_note, print_view
from shardwright.cli_options import AsJson
from shardwright.cli_serve import check_installed
from shardwright.cli_text import table

if TYPE_CHECKING:
    from shardwright.api.store import Key, Store

keys = typer.Typer(
    name="keys",
    help="Makes, lists and revokes the API keys of the planning service.",
    no_args_is_help=True,
)

DataDir = Annotated[
    Path | None, typer.Option(help="The service's folder, where it is not the default.")
]


@keys.command()
def create(
    name: Annotated[str, typer.Argument(help="Whose key it is, or what for.")],
    scope: Annotated[
        list[str] | None,
        typer.Option(
            help="read, plan (ask, upload and cancel) or admin (sees all). Repeatable; read and "
            "plan where none is given."
        ),
    ] = None,
    owner: Annotated[
        str | None,
        typer.Option(help="Keys of one owner see the same plans; else the key has its own."),
    ] = None,
    rate: Annotated[int | None, typer.Option(help="Requests a minute.", min=0)] = None,
    quota: Annotated[int | None, typer.Option(help="New plans in 24 hours.", min=0)] = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Makes a key and prints it, this once."""
    with _store(data_dir) as store:
        key, text = store.keys.create(
            name,
            scope or ["read", "plan"],
            owner,
            rate_limit_per_minute=rate,
            plan_quota_per_day=quota,
        )
    if as_json:
        print(json.dumps(_as_data(key) | {"key": text}, indent=1))
        return
    print(text)
    print_note(f"key {key.id} of {name}: {', '.join(key.scopes)}. It is not shown again.")


@keys.command("list")
def list_keys(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Shows every key, without its secret."""
    with _store(data_dir) as store:
        found = store.keys.list()
    if as_json:
        print(json.dumps([_as_data(key) for key in found], indent=1))
        return
    shown = table("id", "name", "owner", "scopes", "created", "last used", "revoked")
    shown.columns[0].no_wrap = True  # it is copied from here
    for key in found:
        shown.add_row(
            key.id,
            key.name,
            key.owner,
            ", ".join(key.scopes),
            *map(_moment, (key.created_at, key.last_used_at, key.revoked_at)),
        )
    print_view(shown)


@keys.command()
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="Of a key, as `keys list` shows.")],
    data_dir: DataDir = None,
) -> None:
    """Ends a key for good; a server that runs takes it for two more seconds at most."""
    with _store(data_dir) as store:
        key = store.keys.revoke(key_id)
    print_note(f"key {key.id} of {key.name} is revoked")


@contextmanager
def _store(data_dir: Path | None) -> Iterator[Store]:
    check_installed()
    from shardwright.api.settings import load_settings
    from shardwright.api.store import Store

    settings = load_settings(**({} if data_dir is None else {"data_dir": data_dir}))
    store = Store.open(settings)
    try:
        yield store
    finally:
        store.close()


def _moment(at: datetime | None) -> str:
    return "-" if at is None else f"{at:%Y-%m-%d %H:%M}"


def _as_data(key: Key) -> dict[str, Any]:
    def moment(at: datetime | None) -> str | None:
        return None if at is None else at.isoformat()

    return {
        "id": key.id,
        "name": key.name,
        "owner": key.owner,
        "scopes": list(key.scopes),
        "created_at": moment(key.created_at),
        "last_used_at": moment(key.last_used_at),
        "revoked_at": moment(key.revoked_at),
        "rate_limit_per_minute": key.rate_limit_per_minute,
        "plan_quota_per_day": key.plan_quota_per_day,
    }
