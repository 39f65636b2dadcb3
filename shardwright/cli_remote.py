"""`--server`: what is planned or priced by a service, from what a local run is given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwright.cli_inputs import Target
    from shardwright.planner.comparison import Comparison
    from shardwright.planner.plan import Plan
    from shardwright.planner.plan_schema import EstimateModel


def check_server(server: str | None, api_key: str | None) -> None:
    """Refuses what cannot be a server before anything is loaded.

    Raises:
      InputError: the URL or the key is none.
    """
    if server is not None:
        from shardwright.client import Client

        Client(server, api_key or None).close()


def plan_on_server(
    server: str,
    api_key: str | None,
    loaded: Target,
    **options: Any,
) -> Plan:
    """A plan by a service; reference models go by name, everything else as a program.

    Args:
      server: its URL.
      api_key: where it has keys.
      loaded: what to plan.
      options: as for `shardwright.plan`.
    """
    from shardwright.client import Client

    with Client(server, api_key or None) as client:
        if loaded.model is not None:
            return client.plan(loaded.model, options=loaded.options, **options)
        return client.plan(
            loaded.program,
            *loaded.args,
            donate_argnums=loaded.donate,
            name=loaded.name,
            **options,
        )


def evaluate_on_server(
    server: str, api_key: str | None, loaded: Target, **options: Any
) -> EstimateModel:
    """The price of a sharding by a service; `options` as for `shardwright.evaluate`."""
    from shardwright.client import Client

    with Client(server, api_key or None) as client:
        return client.evaluate(loaded.program, *loaded.args, **options)


def compare_on_server(
    server: str,
    api_key: str | None,
    loaded: Target,
    **options: Any,
) -> Comparison:
    """A comparison by a service; arguments as of `plan_on_server`, `options` as of `compare`."""
    from shardwright.client import Client

    with Client(server, api_key or None) as client:
        if loaded.model is not None:
            return client.compare(loaded.model, options=loaded.options, **options)
        return client.compare(loaded.program, *loaded.args, donate_argnums=loaded.donate, **options)
