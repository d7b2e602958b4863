"""How much each client may ask for: a token bucket per principal, in a table that stays small.

A bucket holds up to `burst` tokens and gains `rate` a second. What asks for more than a bucket can ever hold passes
when it is full, and leaves a debt; else it could never pass. 1. A principal never gets more than burst + rate x time,
and what its last request was larger than the burst. 2. Who is told to wait for so long passes then, if nobody else
took from the same bucket. 3. The table has `most` buckets: full ones are forgotten, for they say nothing, and when
none is full whoever is new shares one bucket with all who came as late. Forgetting the oldest instead would forgive
its debt to whoever can send from many addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

__all__ = ["TokenBuckets"]

_MOST_PRINCIPALS: Final = 16_384
_SWEEP_SECONDS: Final = 1.0  # between looks for full buckets, which cost milliseconds where the table is full


class _Bucket:
    __slots__ = ("at", "tokens")

    def __init__(self, tokens: float, at: float) -> None:
        self.tokens = tokens
        self.at = at


class TokenBuckets:
    """Buckets by principal, off until `set` gives them a rate.

    Args:
        clock: seconds of a clock that never runs backwards.
        most: buckets in the table.
    """

    def __init__(self, clock: Callable[[], float], most: int = _MOST_PRINCIPALS) -> None:
        self._clock = clock
        self._most = most
        self._rate = 0.0
        self._burst = 0.0
        self._buckets: dict[str, _Bucket] = {}
        self._others = _Bucket(0.0, clock())
        self._swept_at = clock() - _SWEEP_SECONDS

    @property
    def is_on(self) -> bool:
        """Whether anybody is limited."""
        return self._rate > 0

    def __len__(self) -> int:
        return len(self._buckets)

    def set(self, rate: float, burst: float) -> None:
        """Change tokens per second (0 = off) and the size of buckets; what they hold is kept as far as it fits."""
        now = self._clock()
        if self.is_on and rate > 0:
            for bucket in (*self._buckets.values(), self._others):
                self._fill(bucket, now)
                bucket.tokens = min(bucket.tokens, burst)
        else:  # it says nothing what was in them before
            self._buckets.clear()
            self._others = _Bucket(burst, now)
        self._rate, self._burst = rate, burst

    def take(self, principal: str, amount: float) -> float:
        """Take tokens of a principal.

        Returns:
            0 when they are taken; else nothing is, and so many seconds later they could be.
        """
        bucket = self._bucket(principal)
        needed = min(amount, self._burst)
        if bucket.tokens < needed:
            return (needed - bucket.tokens) / self._rate
        bucket.tokens -= amount
        return 0.0

    def give_back(self, principal: str, amount: float) -> None:
        """Put back what was taken for something that was not done after all."""
        bucket = self._bucket(principal)
        bucket.tokens = min(bucket.tokens + amount, self._burst)

    def _bucket(self, principal: str) -> _Bucket:
        """Return a principal's bucket as it is now."""
        now = self._clock()
        bucket = self._buckets.get(principal)
        if bucket is None:
            if len(self._buckets) >= self._most:
                self._forget_full(now)
            if len(self._buckets) >= self._most:
                self._fill(self._others, now)
                return self._others
            bucket = self._buckets[principal] = _Bucket(self._burst, now)
            return bucket
        self._fill(bucket, now)
        return bucket

    def _fill(self, bucket: _Bucket, now: float) -> None:
        bucket.tokens = min(self._burst, bucket.tokens + (now - bucket.at) * self._rate)
        bucket.at = now

    def _forget_full(self, now: float) -> None:
        if now - self._swept_at < _SWEEP_SECONDS:
            return
        self._swept_at = now
        for principal, bucket in list(self._buckets.items()):
            self._fill(bucket, now)
            if bucket.tokens >= self._burst:
                del self._buckets[principal]
