# SPDX-License-Identifier: Apache-2.0
"""When a call that failed is made again. The rules are those of the C++ library."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass
from typing import Optional

from .errors import DenoisedError, FailedPrecondition, InvalidArgument, ResourceExhausted, Unavailable


@dataclass(frozen=True)
class RetryPolicy:
    """Retried are UNAVAILABLE, of a server that cannot be reached, leaves or was lost, and, with a time to
    come back, RESOURCE_EXHAUSTED (a full queue) and FAILED_PRECONDITION (a model that is loading or being replaced).
    Drawing twice is harmless: the seed is fixed before the first attempt, so every attempt yields the
    same bytes."""

    max_attempts: int = 5
    """Of a call, while they bring nothing new; 1: never retry."""
    initial_backoff: float = 0.1
    """Seconds."""
    max_backoff: float = 10.0
    """Seconds."""
    multiplier: float = 2.0
    budget: int = 100
    """Retries of a client that may fail with UNAVAILABLE before it stops to retry; ten calls that
    succeed allow one more, up to this."""
    restart_attempts: int = 10
    """Instead of max_attempts, where that is less and not 1, once a call of the client has had a reply or
    an event, for all but a full queue and health checks: the server may be restarting. With the other
    defaults, five attempts take about a second and ten 16 to 33, beside what the server asks for."""

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise InvalidArgument(
                f"max_attempts is {self.max_attempts}; use 1 (no retries) or more")
        if self.budget < 1:
            raise InvalidArgument(
                f"budget is {self.budget}; use 1 or more, or max_attempts=1 to retry nothing")
        if not self.multiplier >= 1:
            raise InvalidArgument(f"multiplier is {self.multiplier}; use 1 or more")
        if self.initial_backoff < 0 or self.max_backoff < 0:
            raise InvalidArgument("a backoff is negative; use 0 seconds or more")


def retryable(error: DenoisedError) -> bool:
    return isinstance(error, Unavailable) or (
        isinstance(error, (ResourceExhausted, FailedPrecondition)) and error.retry_after is not None)


class RetryBudget:
    """How many failed retries the calls of a client may still make, so that retries do not pile up
    on servers that fail for everyone. First attempts do not count. It also knows whether any call was
    answered. Thread-safe."""

    def __init__(self, size: int) -> None:
        self._size = self._left = 10 * size  # in tenths of a retry
        self.answered = False
        self._lock = threading.Lock()

    def succeeded(self) -> None:
        with self._lock:
            self._left = min(self._left + 1, self._size)

    def retry_failed(self) -> None:
        with self._lock:
            self._left = max(self._left - 10, 0)

    @property
    def empty(self) -> bool:
        with self._lock:
            return self._left < 10


class Attempts:
    """The attempts of one call and its deadline. Used by one thread at a time."""

    def __init__(self, policy: RetryPolicy, budget: RetryBudget, timeout: Optional[float]) -> None:
        self._policy = policy
        self._budget = budget
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._count = 1
        self._backoff = policy.initial_backoff

    @property
    def retries(self) -> bool:
        """Whether any failed call is made again."""
        return self._policy.max_attempts > 1

    def remaining(self) -> Optional[float]:
        """Seconds until the deadline, never negative; None when there is none."""
        if self._deadline is None:
            return None
        return max(0.0, self._deadline - time.monotonic())

    def renew(self) -> None:
        """The latest attempt brought something new: earlier failures no longer count."""
        self._count = 1
        self._backoff = self._policy.initial_backoff
        self._budget.answered = True

    def succeeded(self) -> None:
        """The next call may fail as often as this one."""
        self._budget.succeeded()
        self.renew()

    def failed(self, error: DenoisedError) -> Optional[float]:
        """Seconds to wait before the next attempt; None when the caller gets `error`."""
        delay = self._next_delay(error)
        # A retry at the time that the server asked for is no burden to it, so it costs nothing.
        if retryable(error) and error.retry_after is None:
            if self._count > 1:
                self._budget.retry_failed()
            if self._budget.empty:
                return None
        self._count += 1
        # Not a power of the count, which overflows.
        self._backoff = min(self._policy.max_backoff, self._backoff * self._policy.multiplier)
        return delay

    def _most(self, error: DenoisedError) -> int:
        policy = self._policy
        if policy.max_attempts > 1 and not isinstance(error, ResourceExhausted) and self._budget.answered:
            return max(policy.max_attempts, policy.restart_attempts)
        return policy.max_attempts

    def _next_delay(self, error: DenoisedError) -> Optional[float]:
        if self._count >= self._most(error) or not retryable(error):
            return None
        backoff = min(self._policy.max_backoff, self._backoff)
        # In the upper half, so that clients which failed together do not return together.
        delay = backoff * (1 + random.random()) / 2
        # On top of RetryInfo, not instead of it: all who were refused were told the same time.
        delay += error.retry_after or 0.0
        remaining = self.remaining()
        return None if remaining is not None and delay >= remaining else delay
