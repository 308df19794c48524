"""Conversations: requests of one client that follow each other, each with the tokens of the one before.

A conversation keeps two things between its requests. Its blocks are retained in the cache, within the share of its
tenant (cache_svc/core/memory/shares.py). And its requests have the queue position of its first one, so that a later
request does not queue behind everything that came meanwhile, as in Continuum's program order (arXiv 2511.02230). Under
the order `fair` this moves a request ahead of requests of its own tenant only.

A conversation ends when it is released or was idle for `ttl_s`. There are also limits for each tenant and for all
tenants together (number of conversations, bytes of their tokens). When a limit is exceeded, the least recently used
conversation of that tenant, or of all tenants, ends. A scheduler that takes over knows no conversations.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from paceline.v1.common_pb2 import RetentionRange
from scheduler_svc.core.cache.link import CacheLink
from scheduler_svc.core.rejection import invalid
from scheduler_svc.core.requests.request import Request

# Limits of one tenant and of all tenants: conversations, and bytes of the tokens that are kept to find their blocks.
MAX_OF_TENANT, MAX_OF_ALL = (256, 16 * 2**20), (4096, 64 * 2**20)
# Above tokens without a retention (35), and below what clients ask for as the most important (100).
RETENTION_PRIORITY = 60


@dataclass(slots=True, eq=False)
class Conversation:
    """What the scheduler keeps of a conversation between its requests."""

    name: str
    tenant: str
    queue_position: int
    used_s: float  # when its last request began or ended
    num_live: int = 0  # requests that have not ended
    # Of its last request that ended: how the cache finds its blocks.
    lora: str = ""
    cache_salt: str = ""
    token_ids: bytes = b""


class _Usage:
    """Conversations in the order of their last use, and the bytes of their tokens."""

    def __init__(self) -> None:
        self.by_name: OrderedDict[str, Conversation] = OrderedDict()
        self.num_bytes = 0

    def exceeds(self, limits: tuple[int, int]) -> bool:
        return len(self.by_name) > limits[0] or self.num_bytes > limits[1]

    @property
    def oldest(self) -> Conversation:
        return next(iter(self.by_name.values()))


class Conversations:
    """All conversations of a scheduler, by name. Times are on the scheduler's clock."""

    def __init__(self, cache: CacheLink, ttl_s: float) -> None:
        self._cache = cache
        self._ttl_s = ttl_s
        self._all = _Usage()
        self._of_tenant: dict[str, _Usage] = {}

    def join(self, request: Request, now_s: float) -> None:
        """A request arrives. If it names a conversation, the request gets the queue position of the conversation's
        first request, and retains its tokens unless it says itself which tokens to retain. Raises Rejection for another
        tenant's conversation."""
        if not request.metadata.conversation:
            return
        one = self._all.by_name.get(request.metadata.conversation)
        if one is not None and one.tenant != request.metadata.tenant:
            raise invalid("conversation", "belongs to another tenant")
        if one is None:
            one = Conversation(request.metadata.conversation, request.metadata.tenant, request.queue_position, now_s)
            self._all.by_name[one.name] = one
            self._of_tenant.setdefault(one.tenant, _Usage()).by_name[one.name] = one
        one.num_live += 1
        self._touch(one, now_s)
        self._bound(one.tenant)
        request.queue_position = one.queue_position
        if not request.metadata.cache_retention:
            kept_ms = int(1000 * self._ttl_s)
            request.metadata.cache_retention = (RetentionRange(priority=RETENTION_PRIORITY, duration_ms=kept_ms),)

    def left(self, request: Request, now_s: float) -> None:
        """The request has ended, and its output is known."""
        if not request.metadata.conversation:
            return
        one = self._all.by_name.get(request.metadata.conversation)
        if one is None:  # the conversation ended while the request ran, and the request has retained blocks since
            self._cache.end_retention(
                request.metadata.lora, request.metadata.cache_salt, request.metadata.tenant, bytes(request.token_ids)
            )
            return
        one.num_live = max(one.num_live - 1, 0)  # the conversation may be a new one of this name
        one.lora, one.cache_salt = request.metadata.lora, request.metadata.cache_salt
        self._set_tokens(one, bytes(request.token_ids))
        self._touch(one, now_s)
        self._bound(one.tenant)

    def release(self, name: str) -> None:
        """End a conversation. Raises KeyError if it is not known."""
        self._end(self._all.by_name[name])

    def expire(self, now_s: float) -> None:
        """End the conversations that were idle for too long. The cache has ended their retention by itself."""
        while self._all.by_name:
            one = self._all.oldest
            if now_s - one.used_s < self._ttl_s:
                return
            if one.num_live:  # a request that runs for long is not idle
                self._touch(one, now_s)
            else:
                self._forget(one)

    def _bound(self, tenant: str) -> None:
        while (usage := self._of_tenant.get(tenant)) is not None and usage.exceeds(MAX_OF_TENANT):
            self._end(usage.oldest)
        while self._all.exceeds(MAX_OF_ALL):
            self._end(self._all.oldest)

    def _touch(self, one: Conversation, now_s: float) -> None:
        one.used_s = now_s
        self._all.by_name.move_to_end(one.name)
        self._of_tenant[one.tenant].by_name.move_to_end(one.name)

    def _set_tokens(self, one: Conversation, token_ids: bytes) -> None:
        for usage in (self._all, self._of_tenant[one.tenant]):
            usage.num_bytes += len(token_ids) - len(one.token_ids)
        one.token_ids = token_ids

    def _end(self, one: Conversation) -> None:
        if one.token_ids:
            self._cache.end_retention(one.lora, one.cache_salt, one.tenant, one.token_ids)
        self._forget(one)

    def _forget(self, one: Conversation) -> None:
        self._set_tokens(one, b"")
        del self._all.by_name[one.name]
        usage = self._of_tenant[one.tenant]
        del usage.by_name[one.name]
        if not usage.by_name:
            del self._of_tenant[one.tenant]
