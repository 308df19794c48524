"""What is stored of a response, and the interface of the stores.

    put ──▶ in_progress ──── finish ────▶ completed, incomplete, failed or cancelled ──▶ deleted or expired
             │       ▲
             └ claim ┘   the lease is over: the gateway is gone or gave it back, and a gateway takes the response over

A response belongs to its owner, the API key that made it ("" without keys). Every operation for a client names the
owner, so no key reaches a response of another key. `abandoned` and `purge` are for the gateways: they reach all owners.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from services.gateway.errors import ApiError, invalid

Status = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
IN_PROGRESS: Status = "in_progress"
ResponseName = tuple[str, str]  # owner and id


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response. `work` and `result` are JSON, `request` is two lines of JSON.

    `fingerprint` tells different requests apart that have the same idempotency key. `request`: what the response object
    shows of its request, and the input items. `work`: the chat that generates the output, with its seed. `tokens`: the
    output up to the last renewal of the lease, as packed 32-bit integers. `work` and `tokens` are empty when the
    response has ended. `result`: the output and how it ended; empty before the end.
    """

    owner: str
    id: str
    model: str
    created_s: int
    background: bool
    fingerprint: bytes
    request: bytes
    work: bytes
    status: Status = IN_PROGRESS
    result: bytes = b""
    tokens: bytes = b""

    @property
    def name(self) -> ResponseName:
        """Owner and id."""
        return self.owner, self.id

    @property
    def num_bytes(self) -> int:
        """The size that counts for the owner: of `request`, `work` and `result`."""
        return len(self.request) + len(self.work) + len(self.result)


class ResponseStore(Protocol):
    """Keeps responses for all gateways that share it. Every method raises ApiError 503 if the store fails.

    A lease tells the other gateways that a gateway works on the response. It ends after some seconds without `renew`.
    """

    async def put(self, response: StoredResponse, lease_s: float) -> bool:
        """Add a response, in progress or ended. False if the owner has one of this id already. A store with a size
        limit (SQLite) raises ApiError 400 if the response is larger than the limit, and 429 if there is no room for it
        now. (Redis limits its memory itself: ApiError 503 if it refuses the write.)"""
        ...

    async def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """The response; None if this owner has none of this id."""
        ...

    async def model_of(self, owner: str, response_id: str) -> str | None:
        """The model of the response, without reading the rest; None if this owner has none of this id."""
        ...

    async def claim(self, owner: str, response_id: str, lease_s: float) -> bool:
        """Take the lease of a response in progress. False if a gateway (this one, too) has the lease, or if there is
        no such response in progress."""
        ...

    async def renew(self, progress: Mapping[ResponseName, bytes], lease_s: float) -> list[ResponseName]:
        """Prolong leases (0 ends them), and store the tokens of each response, unless more are stored. Returns the
        names of responses that are not in progress any more."""
        ...

    async def finish(self, owner: str, response_id: str, status: Status, result: bytes) -> bool:
        """Store how a response ended. False if it is not in progress: the first ending counts."""
        ...

    async def delete(self, owner: str, response_id: str) -> bool:
        """Delete a response. False if this owner has none of this id."""
        ...

    async def abandoned(self, most: int, skip: int = 0) -> list[ResponseName]:
        """Background responses in progress with a lease that is over, the oldest lease first, without the first
        `skip`."""
        ...

    async def purge(self) -> None:
        """Delete what is too old or too much. Call this about once a minute."""
        ...


def too_large(num_bytes: int, max_bytes: int) -> ApiError:
    """The error for a response that the store could never hold."""
    message = (
        f"store: the response, with the conversation before it, takes {num_bytes} bytes in the response store, which "
        f"holds {max_bytes} (--response-store-bytes); shorten the conversation, or set store: false"
    )
    return invalid("store", message)


def full() -> ApiError:
    """The error for a new response without room in an SQLite store. There a new response never displaces a response in
    progress. It displaces ended responses only of its own owner, or of owners that use more bytes."""
    message = (
        "the response store is full, and too few stored responses may be deleted for this one: try again when "
        "responses in progress have ended, or set store: false"
    )
    return ApiError(429, message, code="store_full", retry_after_s=1.0)


def unavailable(reason: object) -> ApiError:
    """The error of a store that fails."""
    message = f"the store does not answer ({type(reason).__name__}); the gateway's log has the details"
    return ApiError(503, message, code="store_unavailable", retry_after_s=1.0)
