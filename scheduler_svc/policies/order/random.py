"""A seeded random order. SGLang's `random` draws a new order in each pass; here each request draws once."""

from __future__ import annotations

from hashlib import blake2b

from scheduler_svc.policies.api import KeyedOrder, RequestView


class Random(KeyedOrder):
    """Orders by a hash of the seed and the arrival index."""

    key_is_constant = True

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.seed = seed

    def key(self, request: RequestView) -> bytes:
        """8 bytes, the same in each run with the same seed."""
        # A checksum is linear, so another seed would hardly change which of two requests is first.
        return blake2b(f"{self.seed} {request.arrival_index}".encode(), digest_size=8).digest()
