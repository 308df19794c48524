"""Limits the open streams of methods that everyone may call: watching health, and reflection. Such a stream costs some
10 KiB for as long as its client wants, and one connection may have any number of them."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from urllib.parse import unquote

# Kubernetes and balancers ask Check. A client with health checking, and a service that looks for the leader, has one
# watch for each server.
MAX_STREAMS, MAX_STREAMS_PER_PEER = 1024, 256


class TooManyStreams(Exception):
    """One stream more than the limit. The message says which limit."""


class OpenStreams:
    """Counts streams by the address of their peer."""

    def __init__(self, max_streams: int = MAX_STREAMS, max_per_peer: int = MAX_STREAMS_PER_PEER) -> None:
        self._max, self._max_per_peer = max_streams, max_per_peer
        self._num_of: Counter[str] = Counter()

    @contextlib.contextmanager
    def hold(self, peer: str) -> Iterator[None]:
        """The context of one open stream. `peer`: as gRPC names it (`ipv4:10.0.0.1:5000`). Raises TooManyStreams."""
        address = unquote(peer).rpartition(":")[0]
        if self._num_of.get(address, 0) >= self._max_per_peer:
            raise TooManyStreams(f"at most {self._max_per_peer} streams of health and reflection from one address")
        if self._num_of.total() >= self._max:
            raise TooManyStreams(f"at most {self._max} streams of health and reflection")
        self._num_of[address] += 1
        try:
            yield
        finally:
            self._num_of[address] -= 1
            if not self._num_of[address]:
                del self._num_of[address]
