"""The store: what the service knows, kept in a database and in files."""

from shardwright.api.store.jobs import QueueFullError, QuotaExceededError
from shardwright.api.store.records import (
    Comparison,
    Job,
    JobEvent,
    Key,
    ProgramRecord,
)
from shardwright.api.store.store import Store

__all__ = [
    "Comparison",
    "Job",
    "JobEvent",
    "Key",
    "ProgramRecord",
    "QueueFullError",
    "QuotaExceededError",
    "Store",
]
