"""Uploads: streamed to a file, recognised by their first bytes, never held in memory."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request

from shardwright.api.problems import Problem, problem

_BLOCK = 1 << 20
_HEAD = 1 << 14
_DRAIN_SECONDS = 2.0
_IDLE_SECONDS = 0.25
_BYTECODE_MAGIC = b"ML\xefR"
# A module may follow comments; aliases of attributes (#), types (!) and resources ({-#) come
# before it.
_STABLEHLO_TEXT = re.compile(
    r'(?:\s|//[^\n]*(?:\n|\Z))*(?:"?(?:builtin\.)?module\b|"?func\.func\b|func\b|[#!]\w|\{-#)'
)
_DO = "Send the bytes of jax.export.export(...)(...).serialize(), or StableHLO as text or bytecode"


@dataclass(frozen=True)
class Upload:
    """A file that was taken in.

    Attributes:
      program_id: SHA-256 of its bytes, in hex.
      kind: "exported", "stablehlo-text" or "stablehlo-bytecode".
    """

    program_id: str
    kind: str
    nbytes: int


async def receive(request: Request, path: Path, max_bytes: int) -> Upload:
    """Streams the body of a request to a file.

    Raises:
      Problem: the body is empty, too large, or not a program; the rest of it is not read then.
    """
    try:
        return await _receive(request, path, max_bytes)
    except Problem:
        await _drain(request)
        raise
    except ClientDisconnect:
        raise problem(
            "malformed", "the upload ended before its end", where="body", do="Send it again"
        ) from None


async def _receive(request: Request, path: Path, max_bytes: int) -> Upload:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > max_bytes:
        raise _too_large(max_bytes)
    digest = hashlib.sha256()
    nbytes, kind = 0, None
    with await run_in_threadpool(path.open, "wb") as file:
        async for block in _blocks(request):
            nbytes += len(block)
            if nbytes > max_bytes:
                raise _too_large(max_bytes)
            kind = kind or kind_of(block[:_HEAD])
            await run_in_threadpool(_write, file, digest, block)
    if kind is None:
        raise problem("input", "the body is empty", where="body", do=_DO)
    return Upload(digest.hexdigest(), kind, nbytes)


async def _blocks(request: Request) -> AsyncIterator[bytes]:
    """The body in blocks large enough to be worth a thread; the first as soon as it tells much."""
    pending = bytearray()
    wanted = _HEAD
    async for chunk in request.stream():
        pending += chunk
        if len(pending) >= wanted:
            yield bytes(pending)
            pending.clear()
            wanted = _BLOCK
    if pending:
        yield bytes(pending)


def _write(file: IO[bytes], digest: hashlib._Hash, block: bytes) -> None:
    digest.update(block)
    file.write(block)


async def _drain(request: Request) -> None:
    """Reads on for a moment, so that clients which only send see the answer and no broken pipe."""
    if "expect" in request.headers:  # it waits for leave to send, which reading would give
        return
    with contextlib.suppress(TimeoutError, ClientDisconnect, RuntimeError):
        async with asyncio.timeout(_DRAIN_SECONDS):
            rest = request.stream()
            while await asyncio.wait_for(anext(rest, b""), _IDLE_SECONDS):
                pass


def kind_of(head: bytes) -> str:
    """What a program is, by its first bytes.

    Raises:
      Problem: it is none.
    """
    if head[:4] == _BYTECODE_MAGIC:
        return "stablehlo-bytecode"
    if _is_exported(head):
        return "exported"
    if b"\0" not in head:
        text = head.decode("utf-8", "replace")
        # The head may end inside a character.
        if "\ufffd" not in text[:-1] and _STABLEHLO_TEXT.match(text):
            return "stablehlo-text"
        if text.lstrip().startswith("{") and '"schema_version"' in text:
            raise problem("input", "this is a plan, not a program", where="body", do=_DO)
    raise problem(
        "input",
        "these bytes begin neither like a jax.export artifact nor like StableHLO",
        where="body",
        do=_DO,
    )


def _is_exported(head: bytes) -> bool:
    """Whether bytes begin with the root table of a serialised `jax.export.Exported`.

    That is a flatbuffer without an identifier, so its offsets must lead to a table whose first
    field is a version above 0 and below 1000.

    Source: FlatBuffers documentation, "Internals"; jax/_src/export/serialization.fbs.
    """
    try:
        (root,) = struct.unpack_from("<I", head, 0)
        (back,) = struct.unpack_from("<i", head, root)
        vtable = root - back
        if root < 4 or vtable < 4:
            return False
        vtable_size, table_size, version_at = struct.unpack_from("<HHH", head, vtable)
        (version,) = struct.unpack_from("<H", head, root + version_at)
    except struct.error:
        return False
    fits: bool = 6 <= vtable_size <= 256 and vtable_size % 2 == 0 and 4 <= version_at < table_size
    return fits and version in range(1, 1000)


def _too_large(max_bytes: int) -> Problem:
    return problem(
        "too-large",
        f"a program has at most {max_bytes} bytes here",
        where="body",
        do="Leave large constants out of the program: pass them as arguments",
    )
