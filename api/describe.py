"""Traces reference models in a process of its own, so that the server never imports JAX.

Reads a JSON list of `{"name", "options"}` from stdin and writes one of descriptions to stdout; the
inputs of each model have the paths that plans use.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from typing import Any

from shardwright.api.jobs.worker import end_with

_MEMORY_BYTES = 6 << 30


def describe(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """What is known of a model once its arguments are traced.

    Raises:
      InputError: an unknown name or option, or sizes that disagree.
    """
    import jax

    from shardwright.models import build

    model = build(name, **options)
    leaves = jax.tree_util.tree_leaves_with_path(model.example_args)
    inputs = [
        [jax.tree_util.keystr(path), [int(size) for size in leaf.shape]] for path, leaf in leaves
    ]
    return model.facts() | {"inputs": inputs}


def main() -> None:
    """Answers one list of questions, and ends with the process that asks."""
    end_with(int(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    asked = json.load(sys.stdin)
    json.dump([describe(one["name"], one["options"]) for one in asked], sys.stdout)


if __name__ == "__main__":
    main()
