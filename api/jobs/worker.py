"""A process that runs tasks one after another: `python -m shardwright.api.jobs.worker FD PARENT`.

It imports and compiles all that planning needs before the first task comes, and ends with the
process that started it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from shardwright.api.jobs import channel
from shardwright.errors import DoesNotFitError, ShardwrightError

_PR_SET_PDEATHSIG = 1
_NICENESS = 10
"""Planning takes every core it gets; the server answers requests beside it."""


def main() -> None:
    """Runs tasks until the other side of the channel is closed."""
    descriptor, parent = map(int, sys.argv[1:3])
    end_with(parent)
    _be_modest()
    connection = Connection(descriptor)
    # What libraries print goes to the log.
    os.dup2(2, 1)
    faulthandler.enable(all_threads=False)
    from shardwright.api.jobs.tasks import run, warm_up

    warm_up()
    os.nice(_NICENESS)
    with contextlib.suppress(EOFError, OSError):
        channel.send(connection, {"ready": True})
        while True:
            channel.send(connection, _run(channel.receive(connection), run, connection))


def _run(
    task: dict[str, Any], run: Callable[..., dict[str, Any]], connection: Connection
) -> dict[str, Any]:
    def report(progress: dict[str, Any]) -> None:
        channel.send(connection, {"progress": progress})

    program = task["program"]
    try:
        done = run(
            task["kind"],
            task["request"],
            None if program is None else Path(program),
            Path(task["out"]),
            report,
        )
        return {"done": done}
    except DoesNotFitError as error:
        failed = _failed("does-not-fit", error.what, error.where, error.do)
        failed["failed"] |= {"least_bytes": error.least_bytes, "limit_bytes": error.limit_bytes}
        return failed
    except ShardwrightError as error:
        return _failed("input", error.what, error.where, error.do)
    except MemoryError:
        return _failed("out-of-memory", "there was no memory left", "job", _SMALLER)
    except RecursionError:
        return _failed(
            "input",
            "the program is nested too deeply",
            "program",
            "Lower it with loops (jax.lax.scan) instead of nesting",
        )
    except Exception as error:  # a fault: the job fails, and the worker goes on
        traceback.print_exc()
        what = f"{type(error).__name__}: {str(error)[:500]}"
        return _failed("internal", what, task["kind"], "Report it, with the program if you may")


_SMALLER = "Make the program smaller, or have the operator raise SHARDWRIGHT_JOB_MEMORY_BYTES"


def _failed(kind: str, what: str, where: str, do: str) -> dict[str, Any]:
    return {"failed": {"kind": kind, "what": what, "where": where, "do": do}}


def end_with(parent: int) -> None:
    """Has the system kill this process when the one that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        _watch(parent)
    if os.getppid() != parent:
        sys.exit("the server ended before its worker began")


def _watch(parent: int) -> None:
    import threading

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _be_modest() -> None:
    """Leaves the server alive where memory runs out, and the disk empty."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The system should end a worker and not the server.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


if __name__ == "__main__":
    main()
