"""The clients of a gateway: who may ask, and how much each may use.

A client is known by its key. The keys with quotas are read again when their file changes, so a key that is added or
removed counts at once. A quota is a pair of leaky buckets, each as large as a minute's allowance, and a number of
sequences in flight. The prompt's tokens are booked when a request is admitted, and those of the answer when it ends: a
client can exceed its tokens by what it has in flight, and then waits until the excess is paid off.
"""

import hmac
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from codec.errors import SwarmError, UsageError
from node.settings.client_keys import ClientKey, Quota, digest_of, read_keys
from node.settings.event_log import EventLog
from node.status.work_schema import ClientStatus

__all__ = ["Client", "Clients", "OverQuota"]

LOOK_EVERY_S: Final = 1.0
"""How often the file of keys is looked at."""
MINUTE_S: Final = 60.0
MOST_RETRY_S: Final = 3600
"""The most seconds that a client is told to wait."""

_log = EventLog(__name__)


class OverQuota(SwarmError):
    """The client's quota is used up. `retry_s`: whole seconds until it may try again."""

    def __init__(self, why: str, retry_s: int) -> None:
        super().__init__(why)
        self.retry_s = retry_s


class _Bucket:
    """Counts what is used of `per_minute` (0: no limit), and leaks at that rate."""

    def __init__(self, per_minute: int, now: float) -> None:
        self._per_minute, self._level, self._at = per_minute, 0.0, now

    def wait_s(self, now: float, more: float) -> float:
        """Seconds until `more` may be used; 0: now. What is larger than the bucket may be used once that is empty."""
        if not self._per_minute:
            return 0.0
        self._leak(now)
        excess = self._level + min(more, self._per_minute) - self._per_minute
        return max(0.0, excess * MINUTE_S / self._per_minute)

    def use(self, now: float, count: float) -> None:
        """`count` was used, whether it was allowed or not."""
        self._leak(now)
        self._level += count

    def _leak(self, now: float) -> None:
        self._level = max(0.0, self._level - (now - self._at) * self._per_minute / MINUTE_S)
        self._at = now


class Client:
    """What one key has used. Its methods raise `OverQuota`."""

    def __init__(self, name: str, quota: Quota, clock: Callable[[], float]) -> None:
        self.name, self.quota, self._clock = name, quota, clock
        self._requests = _Bucket(quota.requests_per_minute, clock())
        self._tokens = _Bucket(quota.tokens_per_minute, clock())
        self.in_flight = 0
        """Sequences that are asked for and not answered."""
        self.requests = self.tokens = self.refused = 0
        """Since the gateway started: requests that were admitted, tokens of their prompts and answers, and requests
        that were refused for the quota."""

    def admit(self) -> None:
        """A request came. It counts when it is admitted."""
        self._check("requests", self._requests, 1)
        self._check("tokens", self._tokens, 1)
        self._requests.use(self._clock(), 1)
        self.requests += 1

    @contextmanager
    def flight(self, samples: int, prompt_tokens: int, *, again: bool = False) -> Iterator[None]:
        """An admitted request has so many sequences in flight while the block runs. `again`: a seed that ended has let
        it in, so it is not refused. Raises `OverQuota`."""
        if not again and self.quota.in_flight and self.in_flight + samples > self.quota.in_flight:
            self.refused += 1
            why = f"{self.in_flight} sequences of this key are in flight, and it may have {self.quota.in_flight}."
            raise OverQuota(why, 1)
        if not again:
            self._check("tokens", self._tokens, prompt_tokens)
        self.use(prompt_tokens)
        self.in_flight += samples
        try:
            yield
        finally:
            self.in_flight -= samples

    def use(self, tokens: int) -> None:
        """Tokens of a prompt or an answer."""
        self._tokens.use(self._clock(), tokens)
        self.tokens += tokens

    def status(self) -> ClientStatus:
        """For people and programs."""
        quota = self.quota
        return ClientStatus(
            requests=self.requests,
            tokens=self.tokens,
            refused=self.refused,
            in_flight=self.in_flight,
            requests_per_minute=quota.requests_per_minute,
            tokens_per_minute=quota.tokens_per_minute,
            most_in_flight=quota.in_flight,
        )

    def _check(self, what: str, bucket: _Bucket, more: int) -> None:
        if (wait_s := bucket.wait_s(self._clock(), more)) > 0.0:
            self.refused += 1
            most = getattr(self.quota, f"{what}_per_minute")
            why = f"This key may use {most:,} {what} a minute, and has used them."
            raise OverQuota(why, min(MOST_RETRY_S, max(1, math.ceil(wait_s))))


class Clients:
    """All clients of one gateway."""

    def __init__(self, path: Path | None, key: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        """`path`: the file of keys with quotas (`node.settings.client_keys`), which may not exist; None: there is none.
        `key`: a key without a quota, if any. Without either, all that connect are one client. Raises `UsageError` for a
        file that cannot be read."""
        self._path, self._key, self._clock = path, key, clock
        self._known: dict[str, Client] = {}
        """By the digest of the key."""
        self._closed = False
        """There is a file of keys."""
        self._open = Client("", Quota(), clock)
        """Clients without a key of the file."""
        self._stamp: tuple[int, int, int] | None = None
        self._looked_at = clock()
        if path is not None:
            self._stamp = _stamp_of(path)
            self._take(read_keys(path))

    def find(self, authorization: str) -> Client | None:
        """The client that sends this header; None: it may not ask."""
        self._look()
        if not self._key and not self._closed:
            return self._open
        scheme, _, key = authorization.partition(" ")
        if self._key and hmac.compare_digest(authorization.encode(), f"Bearer {self._key}".encode()):
            return self._open
        return self._known.get(digest_of(key)) if scheme == "Bearer" else None

    def status(self) -> dict[str, ClientStatus]:
        """By the names of the keys with quotas."""
        return {client.name: client.status() for client in self._known.values()}

    def _look(self) -> None:
        """Read the file again if it has changed. One that cannot be read changes nothing."""
        now = self._clock()
        if self._path is None or now - self._looked_at < LOOK_EVERY_S:
            return
        self._looked_at = now
        if (stamp := _stamp_of(self._path)) == self._stamp:
            return
        self._stamp = stamp
        try:
            self._take(read_keys(self._path))
        except UsageError as error:
            _log.warning("keys_unread", why=str(error))

    def _take(self, keys: list[ClientKey] | None) -> None:
        self._closed = keys is not None or self._closed  # a file that is deleted does not open the gateway
        before, self._known = self._known, {}
        for key in keys or ():
            known = before.get(key.digest)
            if known is None or (known.name, known.quota) != (key.name, key.quota):
                known = Client(key.name, key.quota, self._clock)
            self._known[key.digest] = known


def _stamp_of(path: Path) -> tuple[int, int, int] | None:
    """What changes when the file is written; None: there is no file."""
    with suppress(OSError):
        found = path.stat()
        return found.st_ino, found.st_mtime_ns, found.st_size
    return None
