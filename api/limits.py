"""How often a key may ask."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

_MOST_KEYS = 10_000


@dataclass
class _Bucket:
    tokens: float
    filled_at: float


class RateLimiter:
    """A token bucket for each key: a minute's worth of requests at once, then an even rate.

    Buckets live in this process, so with several servers each has its own. Not thread-safe: the
    event loop alone calls it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def take(self, key: str, per_minute: float) -> float:
        """Takes one request from a key's bucket.

        Args:
          key: whose bucket.
          per_minute: requests a minute; with 0 there is never one.

        Returns:
          0 where the request may go on, else the seconds until one may.
        """
        if per_minute <= 0:
            return 60.0
        now = self._clock()
        bucket = self._buckets.setdefault(key, _Bucket(per_minute, now))
        self._buckets.move_to_end(key)
        if len(self._buckets) > _MOST_KEYS:
            self._buckets.popitem(last=False)
        rate = per_minute / 60
        bucket.tokens = min(per_minute, bucket.tokens + (now - bucket.filled_at) * rate)
        bucket.filled_at = now
        if bucket.tokens < 1:
            return (1 - bucket.tokens) / rate
        bucket.tokens -= 1
        return 0.0
