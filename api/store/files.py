"""Programs and results as files, in a folder or an object store."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, cast

import fsspec
from fsspec.implementations.local import LocalFileSystem

from shardwright.errors import InputError

_PARTIAL = ".partial-"


class Files:
    """Files under one URL, each whole or absent: nobody sees half of one."""

    def __init__(self, url: str) -> None:
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url)
            self._fs.makedirs(self._root, exist_ok=True)
            if self._is_local:
                with tempfile.TemporaryFile(dir=self._root):
                    pass
        except (OSError, ValueError, ImportError) as error:
            raise InputError(
                f"files cannot be kept there ({error})",
                where=f"SHARDWRIGHT_FILES_URL {url}",
                do="Give a folder that can be written, or gs://... or s3://... with the package "
                "of that store (gcsfs, s3fs) installed",
            ) from None

    def url(self, path: str) -> str:
        """The URL of a file, which fsspec opens anywhere."""
        return str(self._fs.unstrip_protocol(self._full(path)))

    def local_path(self, path: str) -> Path | None:
        """Where a file is on this machine; None in an object store."""
        return Path(self._full(path)) if self._is_local else None

    def exists(self, path: str) -> bool:
        """A whole file is there."""
        return bool(self._fs.isfile(self._full(path)))

    def write(self, path: str, data: bytes) -> None:
        """Writes a file."""
        with self._landing(path) as landing:
            if landing is None:
                # Object stores show an object only once it is whole.
                self._fs.pipe_file(self._full(path), data)
            else:
                landing.write_bytes(data)

    def put(self, source: Path, path: str) -> None:
        """Moves a file of this machine into the store."""
        with self._landing(path) as landing:
            if landing is None:
                self._fs.put_file(str(source), self._full(path))
            else:
                shutil.move(source, landing)
        source.unlink(missing_ok=True)

    def read(self, path: str) -> bytes:
        """The bytes of a file.

        Raises:
          FileNotFoundError: there is none.
        """
        return cast(bytes, self._fs.cat_file(self._full(path)))

    @contextlib.contextmanager
    def open(self, path: str) -> Iterator[IO[bytes]]:
        """A file open for reading in pieces.

        Raises:
          FileNotFoundError: there is none.
        """
        with self._fs.open(self._full(path), "rb") as file:
            yield cast("IO[bytes]", file)

    def size(self, path: str) -> int:
        """Bytes in a file."""
        return int(self._fs.size(self._full(path)))

    def modified(self, path: str) -> datetime:
        """When a file was last written; now, where there is none."""
        with contextlib.suppress(FileNotFoundError):
            told: datetime = self._fs.modified(self._full(path))
            return told.replace(tzinfo=UTC) if told.tzinfo is None else told
        return datetime.now(UTC)

    def delete_tree(self, path: str) -> None:
        """Deletes a folder with all in it, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm(self._full(path), recursive=True)

    def folders(self, path: str) -> list[str]:
        """Names of the folders in a folder."""
        try:
            found: list[dict[str, Any]] = self._fs.ls(self._full(path), detail=True)
        except FileNotFoundError:
            return []
        return [
            entry["name"].rstrip("/").rpartition("/")[2]
            for entry in found
            if entry["type"] == "directory"
        ]

    @property
    def _is_local(self) -> bool:
        return isinstance(self._fs, LocalFileSystem)

    def _full(self, path: str) -> str:
        parts = path.split("/")
        if not path or any(part in ("", ".", "..") for part in parts):
            raise ValueError(f"{path!r} is not a path in the store of files")
        return f"{self._root.rstrip('/')}/{path}"

    @contextlib.contextmanager
    def _landing(self, path: str) -> Iterator[Path | None]:
        """A temporary neighbour that becomes the file at the end; None in an object store."""
        if not self._is_local:
            yield None
            return
        target = Path(self._full(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        landing = target.with_name(f"{_PARTIAL}{secrets.token_hex(8)}")
        try:
            yield landing
            _sync(landing)
            os.replace(landing, target)
            _sync(target.parent)
        finally:
            landing.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Waits until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
