"""Finished results, which never change: kept in memory for readers, with ETags."""

from __future__ import annotations

import gzip
import hashlib
import re
from collections import OrderedDict
from dataclasses import dataclass

from fastapi import Request, Response

_MOST_BYTES = 64 << 20
_YEAR_S = 365 * 86_400
_GZIP_LEVEL = 6


@dataclass(frozen=True)
class Result:
    """One part of a finished job.

    Attributes:
      owner: whose it is.
      packed: the content by gzip; None where that is no shorter.
      headers: beside those of caching.
    """

    owner: str
    content: bytes
    packed: bytes | None
    media_type: str
    etag: str
    headers: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def of(owner: str, content: bytes, media_type: str, **headers: str) -> Result:
        """A result with its ETag; underscores in the names of headers stand for hyphens."""
        etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        named = tuple((name.replace("_", "-"), value) for name, value in headers.items())
        packed = gzip.compress(content, _GZIP_LEVEL, mtime=0)
        shorter = packed if len(packed) < len(content) else None
        return Result(owner, content, shorter, media_type, etag, named)

    @property
    def nbytes(self) -> int:
        """What it takes in memory."""
        return len(self.content) + len(self.packed or b"")


class ResultCache:
    """The results that were read last, up to 64 MiB. Event loop only."""

    def __init__(self) -> None:
        self._results: OrderedDict[tuple[str, str], Result] = OrderedDict()
        self._bytes = 0

    def get(self, owner: str | None, job_id: str, part: str) -> Result | None:
        """A part that is remembered and that the owner (anybody, where None) may see."""
        found = self._results.get((job_id, part))
        if found is None or owner not in (None, found.owner):
            return None
        self._results.move_to_end((job_id, part))
        return found

    def put(self, job_id: str, part: str, result: Result) -> None:
        """Remembers a part, and forgets those not read for long."""
        if result.nbytes > _MOST_BYTES // 4 or (job_id, part) in self._results:
            return
        self._results[job_id, part] = result
        self._bytes += result.nbytes
        while self._bytes > _MOST_BYTES:
            _, dropped = self._results.popitem(last=False)
            self._bytes -= dropped.nbytes


def respond(request: Request, result: Result) -> Response:
    """A result, or 304 where the client has it already."""
    packed = result.packed if _takes_gzip(request) else None
    # Each form of the bytes has an ETag of its own (RFC 9110, section 8.8.3.3).
    etag = result.etag if packed is None else f'{result.etag[:-1]}-gzip"'
    headers = {
        "ETag": etag,
        "Cache-Control": f"private, max-age={_YEAR_S}, immutable",
        "Vary": "Accept-Encoding",
        "X-Content-Type-Options": "nosniff",
        **dict(result.headers),
    }
    known = request.headers.get("if-none-match")
    if known is not None and _matches(known, etag):
        return Response(status_code=304, headers=headers)
    if packed is None:
        return Response(result.content, headers=headers, media_type=result.media_type)
    headers["Content-Encoding"] = "gzip"
    return Response(packed, headers=headers, media_type=result.media_type)


def _takes_gzip(request: Request) -> bool:
    """Accept-Encoding names gzip and does not refuse it (RFC 9110, section 12.5.3)."""
    for part in request.headers.get("accept-encoding", "").split(","):
        name, _, quality = part.partition(";")
        if name.strip().lower() == "gzip":
            return not re.fullmatch(r"\s*q=0(\.0*)?\s*", quality)
    return False


def _matches(known: str, etag: str) -> bool:
    """If-None-Match by weak comparison (RFC 9110, section 13.1.2)."""
    tags = [tag.strip().removeprefix("W/") for tag in known.split(",")]
    return "*" in tags or etag in tags
