"""The connection to a Redis or Valkey server, which gateways on several machines share."""

from __future__ import annotations

from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from services.gateway.store.records import unavailable
from services.runtime.logs import get_logger

_log = get_logger(__name__)

_CONNECT_S, _ANSWER_S = 2.0, 5.0


class RedisLink:
    """A connection to Redis, which opens at the first use. `url`: redis://, rediss:// or unix://, as the package redis
    reads them. In a cluster, all keys must be on one node."""

    def __init__(self, url: str) -> None:
        self.redis: Redis = Redis.from_url(url, socket_connect_timeout=_CONNECT_S, socket_timeout=_ANSWER_S)

    async def ask(self, answer: Any) -> Any:
        """The server's answer. `answer` is an awaitable. It has the type Any, because the package has one type for the
        results of its sync and its async client. Raises ApiError 503 if the server fails."""
        try:
            return await answer
        except (RedisError, OSError) as error:
            _log.error("the store failed", error=str(error))
            raise unavailable(error) from error

    async def script(self, script: str, keys: list[str], *values: Any) -> Any:
        """Run a script on the server, which runs no other command meanwhile."""
        arguments = [value if isinstance(value, bytes | str) else str(value) for value in values]
        return await self.ask(self.redis.eval(script, len(keys), *keys, *arguments))

    async def close(self) -> None:
        """End the connections."""
        await self.redis.aclose()
