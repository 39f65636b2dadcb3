"""A child interpreter that runs tasks: `python -m shardwright.planner.worker`.

Tasks come pickled on stdin and results go pickled to stdout; whatever the work prints goes to
stderr. It ends when its parent closes stdin or dies.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from importlib import import_module
from typing import Any

from shardwright.planner.workers import Task, failure_of, read_message, write_message

_SECONDS_BETWEEN_LOOKS = 1.0


def main() -> None:
    """Runs tasks until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    logging.getLogger("jax").setLevel(logging.ERROR)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            task = read_message(sys.stdin.buffer)
        except EOFError:
            return
        write_message(answers, ("result", _run(task, answers)))


def _run(task: Task, answers: Any) -> Any:
    module, _, name = task.function.partition(":")
    try:
        function = getattr(import_module(module), name)
        return function(task.payload, lambda report: write_message(answers, ("progress", report)))
    except Exception as error:  # a failed task leaves the worker ready for the next
        return failure_of(error)


def _end_with_parent() -> None:
    parent = int(os.environ["SHARDWRIGHT_WORKER_PARENT"])
    while os.getppid() == parent:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    os._exit(1)


if __name__ == "__main__":
    main()
