"""The store as one thing: rows in a database, contents in files."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from sqlalchemy.exc import SQLAlchemyError

from shardwright.api.settings import Settings
from shardwright.api.store.comparisons import Comparisons
from shardwright.api.store.database import Database, ping, unreachable
from shardwright.api.store.expiry import expire
from shardwright.api.store.files import Files
from shardwright.api.store.jobs import Jobs
from shardwright.api.store.keys import Keys
from shardwright.api.store.migrate import migrate
from shardwright.api.store.programs import Programs
from shardwright.api.store.records import Job
from shardwright.errors import InputError

_EXPIRED_AT_ONCE = 50


class Store:
    """Programs, jobs, comparisons and keys; all its methods may be called from any thread."""

    def __init__(self, settings: Settings, database: Database, files: Files) -> None:
        self.settings = settings
        self.database = database
        self.files = files
        self.keys = Keys(database)
        self.jobs = Jobs(database, settings.keep_events)
        self.programs = Programs(database, files, self.jobs)
        self.comparisons = Comparisons(database, self.jobs)
        self._uploads = settings.data_dir / "uploads"
        self._uploads.mkdir(parents=True, exist_ok=True, mode=0o700)
        _delete_stale(self._uploads)

    @staticmethod
    def open(settings: Settings) -> Store:
        """Opens the store, made or brought to this version's schema where it must be.

        Raises:
          InputError: a folder or the database cannot be used, or a newer version wrote it.
        """
        try:
            settings.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise InputError(
                f"the folder cannot be made ({error.strerror})",
                where=f"SHARDWRIGHT_DATA_DIR {settings.data_dir}",
                do="Give a folder that can be written",
            ) from None
        for name in ("uploads", "scratch"):
            _check_writable(settings.data_dir / name)
        database = Database(settings.resolved_database_url)
        try:
            migrate(database.engine)
        except SQLAlchemyError as error:
            database.close()
            raise unreachable(settings.resolved_database_url, error) from None
        except InputError:
            database.close()
            raise
        return Store(settings, database, Files(settings.resolved_files_url))

    def close(self) -> None:
        """Closes the connections to the database."""
        self.database.close()

    def ping(self) -> None:
        """Asks the database for an answer.

        Raises:
          SQLAlchemyError: it gives none.
        """
        ping(self.database)

    def expire(self) -> int:
        """Deletes some of what is older than is kept; how many jobs and programs went.

        Raises:
          SQLAlchemyError, OSError: the database or the files do not answer.
        """
        if self.settings.keep_days is None:
            return 0
        with self.database.read() as session:
            before = self.database.now(session) - timedelta(days=self.settings.keep_days)
        return expire(self.database, self.files, before, _EXPIRED_AT_ONCE)

    def read_result(self, job: Job, name: str) -> bytes | None:
        """A file of a job's result, such as "plan.json"; None where it has none (any more)."""
        path = job.files.get(name)
        if path is not None:
            with contextlib.suppress(FileNotFoundError):
                return self.files.read(path)
        return None

    @contextlib.contextmanager
    def upload_file(self) -> Iterator[Path]:
        """The path of an empty file to stream an upload to; it is deleted if nothing took it."""
        descriptor, path = _locked_file(self._uploads)
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)
            os.close(descriptor)


def _check_writable(folder: Path) -> None:
    """Refuses a folder that cannot be written, as after a start by another user."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(
            f"the folder cannot be written ({error.strerror})",
            where=str(folder),
            do="Make it a folder of the user that runs the service, or set SHARDWRIGHT_DATA_DIR",
        ) from None


def _locked_file(folder: Path) -> tuple[int, Path]:
    """A new file, locked while its descriptor is open: so others see that it is in use."""
    while True:
        descriptor, name = tempfile.mkstemp(dir=folder)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Another server that starts may have deleted it before it was locked.
        if os.path.exists(name):
            return descriptor, Path(name)
        os.close(descriptor)


def _delete_stale(folder: Path) -> None:
    """Deletes uploads that a server left behind when it died: the system has unlocked them."""
    for path in folder.iterdir():
        with contextlib.suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
