"""What every command that plans needs: JAX made quiet, and options of reference models."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from shardwright import cli_specs as specs
from shardwright.cli_console import make_console

if TYPE_CHECKING:
    from shardwright.cli_progress import Report


def model_options(
    settings: Sequence[str] | None,
    batch: int | None,
    sequence: int | None,
    layers: int | None,
    remat: str | None = None,
    *,
    step: str | None = None,
    context: int | None = None,
) -> dict[str, Any]:
    """Options of a reference model as the command line takes them: --set, then those by name."""
    named = {
        "batch": batch, "sequence": sequence, "layers": layers, "remat": remat, "step": step,
        "context": context,
    }  # fmt: skip
    given = {key: value for key, value in named.items() if value is not None}
    return dict(map(specs.parse_setting, settings or ())) | given


@contextlib.contextmanager
def planning(quiet: bool) -> Iterator[Report]:
    """Work that imports JAX: on the CPU, in silence, with stdout kept for the result."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    logging.getLogger("jax").setLevel(logging.ERROR)
    from shardwright.cli_progress import progress_display

    with (
        progress_display(make_console(stderr=True), quiet=quiet) as report,
        contextlib.redirect_stdout(sys.stderr),
    ):
        yield report
