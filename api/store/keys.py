"""API keys: "sw_", an id, "_", and a secret of which only the hash is kept."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Collection
from datetime import timedelta
from typing import get_args

import sqlalchemy as sa

from shardwright.api.store import tables
from shardwright.api.store.database import Database
from shardwright.api.store.records import Key, Scope
from shardwright.errors import InputError

_TEXT = re.compile(r"sw_([0-9a-f]{16})_([0-9a-f]{64})")
_USED_EVERY = timedelta(minutes=1)
"""The last use is noted this often at most, so that reading does not become writing."""
_keys = tables.keys


class Keys:
    """The keys of a store."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(
        self,
        name: str,
        scopes: Collection[str],
        owner: str | None = None,
        *,
        rate_limit_per_minute: int | None = None,
        plan_quota_per_day: int | None = None,
    ) -> tuple[Key, str]:
        """Makes a key.

        Args:
          owner: who its plans and programs belong to; None is the key alone.

        Returns:
          The key, and its text, which is told this once.

        Raises:
          InputError: the name is empty, or a scope is unknown or none is given.
        """
        known = get_args(Scope)
        unknown = [scope for scope in scopes if scope not in known]
        if unknown or not scopes:
            raise InputError(
                f"the scopes are {', '.join(scopes) or 'missing'}",
                where="keys create",
                do=f"Give one or several of {', '.join(known)}",
            )
        limits = (rate_limit_per_minute, plan_quota_per_day)
        if any(limit is not None and limit < 0 for limit in limits):
            raise InputError("a limit is below 0", where="keys create", do="Give 0 or more")
        if not 0 < len(name) <= 200 or (owner is not None and not 0 < len(owner) <= 200):
            raise InputError(
                "names of keys and owners have 1 to 200 characters",
                where="keys create",
                do="Give another name",
            )
        key_id, secret = secrets.token_hex(8), secrets.token_hex(32)
        with self._database.write() as session:
            row = {
                "id": key_id,
                "name": name,
                "owner": owner if owner is not None else f"key:{key_id}",
                # The secret has 256 bits of chance: nobody finds it from a plain hash.
                "secret_sha256": hashlib.sha256(secret.encode()).hexdigest(),
                "scopes": [scope for scope in known if scope in scopes],
                "created_at": self._database.now(session),
                "rate_limit_per_minute": rate_limit_per_minute,
                "plan_quota_per_day": plan_quota_per_day,
            }
            statement = sa.insert(_keys).values(row).returning(*_keys.c)
            made = _key(session.execute(statement).mappings().one())
        return made, f"sw_{key_id}_{secret}"

    def authenticate(self, text: str) -> Key | None:
        """The key with this text; None where there is none or it is revoked."""
        parts = _TEXT.fullmatch(text)
        if parts is None:
            return None
        with self._database.read() as session:
            wanted = sa.select(_keys).where(_keys.c.id == parts[1])
            row = session.execute(wanted).mappings().first()
            now = self._database.now(session)
        if row is None or row["revoked_at"] is not None:
            return None
        given = hashlib.sha256(parts[2].encode()).hexdigest()
        if not hmac.compare_digest(given, row["secret_sha256"]):
            return None
        if row["last_used_at"] is None or row["last_used_at"] < now - _USED_EVERY:
            with self._database.write() as session:
                used = sa.update(_keys).where(_keys.c.id == row["id"]).values(last_used_at=now)
                session.execute(used)
        return _key(row)

    def revoke(self, key_id: str) -> Key:
        """Ends a key; it stays in the list.

        Raises:
          InputError: there is no such key.
        """
        with self._database.write() as session:
            now = self._database.now(session)
            changed = (
                sa.update(_keys)
                .where(_keys.c.id == key_id)
                .values(revoked_at=sa.func.coalesce(_keys.c.revoked_at, now))
                .returning(*_keys.c)
            )
            row = session.execute(changed).mappings().first()
        if row is None:
            raise InputError(
                f"there is no key {key_id}",
                where="keys revoke",
                do="See `shardwright keys list` for their ids",
            )
        return _key(row)

    def list(self) -> list[Key]:
        """Every key, the oldest first, revoked ones too."""
        with self._database.read() as session:
            rows = session.execute(sa.select(_keys).order_by(_keys.c.created_at, _keys.c.id))
            return [_key(row) for row in rows.mappings()]

    def any(self) -> bool:
        """A key was ever made: then requests need one."""
        with self._database.read() as session:
            return session.execute(sa.select(_keys.c.id).limit(1)).first() is not None


def _key(row: sa.RowMapping) -> Key:
    known = {name: row[name] for name in Key.__dataclass_fields__}
    return Key(**known | {"scopes": tuple(row["scopes"])})
