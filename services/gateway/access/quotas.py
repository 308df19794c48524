"""Quotas of keys: requests at a time, tokens in flight, tokens per minute. Each gateway counts for itself.

The counters do not change with each token: a request is charged when it is submitted, and settled when its last
sequence has ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from services.gateway.errors import ApiError
from services.gateway.outcome import SequenceOutcome
from services.runtime.keys.entries import ApiKey

# Retry-After for a client that must wait until one of its own requests ends. The gateway cannot know when that is.
_RETRY_S = 1.0
# Fields of ApiKey, in the order in which they are checked.
QUOTAS = ("max_requests", "tokens_per_minute", "max_tokens_in_flight")
# The server did not serve the request, so its prompt costs nothing.
_NOT_SERVED = (429, 503)


class KeyUsage:
    """What one key uses at the moment."""

    __slots__ = ("at_s", "num_entering", "num_running", "per_minute", "tokens_in_flight", "tokens_left")

    def __init__(self, now_s: float) -> None:
        self.num_running = 0  # requests at the scheduler
        self.num_entering = 0  # requests with a body that is being read or parsed
        self.tokens_in_flight = 0
        # The balance of tokens per minute at `at_s`. It may be below 0: a request is accepted while it is above 0,
        # whatever the prompt costs, and output is charged at the end.
        self.tokens_left, self.at_s = 0.0, now_s
        self.per_minute = 0  # the limit; 0: none

    def refill(self, per_minute: int, now_s: float) -> None:
        """Add what the time since the last call brings. A key that was idle, or had no limit, has one minute's
        tokens."""
        if self.per_minute:
            self.tokens_left = min(self.tokens_left + (now_s - self.at_s) * per_minute / 60, float(per_minute))
        else:
            self.tokens_left = float(per_minute)
        self.per_minute, self.at_s = per_minute, now_s


class Charge:
    """One request's share of its key's quotas, from its submission until all its sequences have ended."""

    def __init__(self, usage: KeyUsage, *, num_sequences: int, prompt: int, output: int, delivered: int) -> None:
        self._usage = usage
        self._left = num_sequences
        self._counts_output = output > 0
        self._reserved = prompt + output
        self._prompt, self._delivered = prompt, delivered
        self._num_output = 0
        self._was_served = False
        usage.num_running += 1
        usage.tokens_in_flight += self._reserved
        usage.tokens_left -= prompt

    def ended(self, outcome: SequenceOutcome) -> None:
        """A sequence has ended."""
        self._num_output += outcome.output_tokens if self._counts_output else 0
        self._was_served |= outcome.output_tokens > 0 or outcome.status not in _NOT_SERVED
        self._left -= 1
        if not self._left:
            self._settle()

    def cancel(self) -> None:
        """The request was not submitted."""
        if self._left > 0:
            self._left = 0
            self._was_served = False
            self._settle()

    def _settle(self) -> None:
        usage = self._usage
        usage.num_running -= 1
        usage.tokens_in_flight -= self._reserved
        usage.tokens_left -= max(self._num_output - self._delivered, 0) if self._was_served else -self._prompt


class Quotas:
    """The usage of all keys with quotas. `clock` gives seconds. A changed limit holds for the next request."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._usages: dict[str, KeyUsage] = {}
        self.num_refused = dict.fromkeys(QUOTAS, 0)  # requests beyond each quota, since the start

    @contextmanager
    def entering(self, key: ApiKey | None, *, new: bool) -> Iterator[None]:
        """The context of a request from its head until its submission. Raises ApiError 429 before its body is read.

        `new` False: the request may be running already. Then the check counts no running requests, and ignores the
        tokens per minute.
        """
        if key is None or not key.has_quotas:
            yield
            return
        usage = self._usage(key)
        self._check_requests(key, usage.num_entering + (usage.num_running if new else 0))
        if new:
            self._check_rate(key, usage)
        usage.num_entering += 1
        try:
            yield
        finally:
            usage.num_entering -= 1

    def charge(
        self,
        key: ApiKey | None,
        *,
        num_sequences: int,
        prompt: int,
        output: int,
        delivered: int = 0,
        offline: bool = False,
    ) -> Charge | None:
        """Charge a request that is submitted now; None if the key has no quotas. This counts running requests only,
        so a request that is still in `entering` does not count twice.

        `prompt`: tokens to compute before the first output. `output`: the most tokens that its sequences may then
                  generate; it is 0 for a beam search, and then `prompt` counts the output tokens, too. `delivered`: how
                  many tokens of `prompt` are output of an earlier run that the client has. `offline`: the request may
                  use half of a quota (of requests, rounded up), so that the rest is left to the key's online requests.
                  If the key has no tokens in flight, the request may use all of max_tokens_in_flight.

        Raises ApiError: 429, and 400 for a request that could never run.
        """
        if key is None or not key.has_quotas:
            return None
        usage = self._usage(key)
        self._check_requests(key, usage.num_running, offline=offline)
        self._check_rate(key, usage, offline=offline)
        self._check_in_flight(key, usage, prompt + output, offline=offline)
        return Charge(usage, num_sequences=num_sequences, prompt=prompt, output=output, delivered=delivered)

    def _usage(self, key: ApiKey) -> KeyUsage:
        now_s = self._clock()
        usage = self._usages.get(key.name)
        if usage is None:
            usage = self._usages[key.name] = KeyUsage(now_s)
        usage.refill(key.tokens_per_minute or 0, now_s)
        return usage

    def _check_requests(self, key: ApiKey, num_requests: int, *, offline: bool = False) -> None:
        if (limit := key.max_requests) is not None and num_requests >= (-(-limit // 2) if offline else limit):
            raise self._refusal(key, "max_requests", limit, "requests at a time", _RETRY_S, offline=offline)

    def _check_rate(self, key: ApiKey, usage: KeyUsage, *, offline: bool = False) -> None:
        if (limit := key.tokens_per_minute) is None:
            return
        kept = limit // 2 if offline else 0
        if usage.tokens_left <= kept:
            wait_s = (1 + kept - usage.tokens_left) * 60 / limit  # until one token more than `kept` is left
            raise self._refusal(key, "tokens_per_minute", limit, "tokens per minute", wait_s, offline=offline)

    def _check_in_flight(self, key: ApiKey, usage: KeyUsage, num_tokens: int, *, offline: bool = False) -> None:
        if (limit := key.max_tokens_in_flight) is None:
            return
        # An offline request that is larger than half of the quota starts only if the key has no tokens in flight.
        most = limit // 2 if offline and usage.tokens_in_flight else limit
        if usage.tokens_in_flight + num_tokens <= most:
            return
        if num_tokens > limit:
            message = (
                f"max_tokens: prompt and output of this request may reach {num_tokens} tokens, and the key "
                f"{key.name!r} may have {limit} tokens in flight (max_tokens_in_flight)"
            )
            raise ApiError(400, message, param="max_tokens", code="request_above_quota")
        raise self._refusal(key, "max_tokens_in_flight", limit, "tokens in flight", _RETRY_S, offline=offline)

    def _refusal(
        self, key: ApiKey, quota: str, limit: int, unit: str, retry_after_s: float, *, offline: bool
    ) -> ApiError:
        self.num_refused[quota] += 1
        share = ", of which offline requests get half" if offline and limit > 1 else ""  # they may use a limit of 1
        message = f"the key {key.name!r} is at its limit of {limit} {unit}{share} ({quota})"
        return ApiError(429, message, retry_after_s=retry_after_s)
