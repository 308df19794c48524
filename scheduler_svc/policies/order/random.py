"""In an order drawn by chance, seeded (SGLang `random`, which draws anew in each pass; here each request draws
once).
"""

from __future__ import annotations

import zlib

from scheduler_svc.core.policy import KeyedOrder
from scheduler_svc.core.view import RequestView


class Random(KeyedOrder):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.seed = seed

    def key(self, request: RequestView) -> int:
        return zlib.crc32(f"{self.seed} {request.seniority}".encode())
