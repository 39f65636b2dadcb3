"""Jobs: taken from the store, run in worker processes, and finished exactly once."""

from shardwright.api.jobs.dispatcher import Dispatcher, Observation
from shardwright.api.jobs.service import make_dispatcher

__all__ = ["Dispatcher", "Observation", "make_dispatcher"]
