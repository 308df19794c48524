"""Stores responses in Redis or Valkey, which gateways on several machines share.

`paceline:response:OWNER:ID` is a hash (an owner has no colon). `paceline:responses:leases` is a sorted set of the
background responses in progress, as OWNER:ID by the end of their leases. Scripts change both at once. Redis deletes a
response when it expires. Redis's `maxmemory` bounds the size of all responses.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from services.gateway.store.records import IN_PROGRESS, ResponseName, Status, StoredResponse
from services.gateway.store.redis_link import RedisLink

_PREFIX = "paceline:response:"
_LEASES = "paceline:responses:leases"
_TEXTS = ("fingerprint", "request", "work", "status", "result", "tokens")
# KEYS: the response, the leases. ARGV of all scripts begins with the member of the leases.
_PUT = """
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
redis.call('HSET', KEYS[1], unpack(ARGV, 5))
redis.call('PEXPIRE', KEYS[1], ARGV[3])
if ARGV[4] == '1' then redis.call('ZADD', KEYS[2], ARGV[2], ARGV[1]) end
return 1
"""
_CLAIM = f"""
if redis.call('HGET', KEYS[1], 'status') ~= '{IN_PROGRESS}' then
  redis.call('ZREM', KEYS[2], ARGV[1])
  return 0
end
if tonumber(redis.call('HGET', KEYS[1], 'lease')) > tonumber(ARGV[2]) then return 0 end
redis.call('HSET', KEYS[1], 'lease', ARGV[3])
if redis.call('HGET', KEYS[1], 'background') == '1' then redis.call('ZADD', KEYS[2], ARGV[3], ARGV[1]) end
return 1
"""
_RENEW = f"""
if redis.call('HGET', KEYS[1], 'status') ~= '{IN_PROGRESS}' then return 0 end
redis.call('HSET', KEYS[1], 'lease', ARGV[2])
redis.call('ZADD', KEYS[2], 'XX', ARGV[2], ARGV[1])
if redis.call('HSTRLEN', KEYS[1], 'tokens') < #ARGV[3] then redis.call('HSET', KEYS[1], 'tokens', ARGV[3]) end
return 1
"""
_FINISH = f"""
if redis.call('HGET', KEYS[1], 'status') ~= '{IN_PROGRESS}' then return 0 end
redis.call('HSET', KEYS[1], 'status', ARGV[2], 'result', ARGV[3], 'work', '', 'tokens', '')
redis.call('PEXPIRE', KEYS[1], ARGV[4])
redis.call('ZREM', KEYS[2], ARGV[1])
return 1
"""
_DELETE = """
redis.call('ZREM', KEYS[2], ARGV[1])
return redis.call('DEL', KEYS[1])
"""


class RedisStore:
    """Stores responses in Redis. `ttl_s`: seconds after which a response is deleted."""

    def __init__(self, link: RedisLink, *, ttl_s: float, clock: Callable[[], float] = time.time) -> None:
        self._link = link
        self._ttl_ms = max(1, int(1000 * ttl_s))
        self._clock = clock

    async def put(self, response: StoredResponse, lease_s: float) -> bool:
        until_s = self._clock() + lease_s
        fields: dict[str, Any] = {
            "model": response.model,
            "created": response.created_s,
            "background": int(response.background),
            "lease": until_s,
            **{name: getattr(response, name) for name in _TEXTS},
        }
        flat = [part for field in fields.items() for part in field]
        has_lease = int(response.background and response.status == IN_PROGRESS)
        return bool(await self._script(_PUT, response.name, until_s, self._ttl_ms, has_lease, *flat))

    async def get(self, owner: str, response_id: str) -> StoredResponse | None:
        found: dict[bytes, bytes] = await self._link.ask(self._link.redis.hgetall(_key((owner, response_id))))
        if not found:
            return None
        fields = {name.decode(): value for name, value in found.items()}
        return StoredResponse(
            owner,
            response_id,
            fields["model"].decode(),
            int(fields["created"]),
            fields["background"] == b"1",
            fields["fingerprint"],
            fields["request"],
            fields["work"],
            fields["status"].decode(),  # type: ignore[arg-type]  # one of Status, as `put` and `finish` wrote it
            fields["result"],
            fields["tokens"],
        )

    async def model_of(self, owner: str, response_id: str) -> str | None:
        found: bytes | None = await self._link.ask(self._link.redis.hget(_key((owner, response_id)), "model"))
        return found.decode() if found is not None else None

    async def claim(self, owner: str, response_id: str, lease_s: float) -> bool:
        now_s = self._clock()
        return bool(await self._script(_CLAIM, (owner, response_id), now_s, now_s + lease_s))

    async def renew(self, progress: Mapping[ResponseName, bytes], lease_s: float) -> list[ResponseName]:
        until_s = self._clock() + lease_s
        pipeline = self._link.redis.pipeline(transaction=False)
        for name, tokens in progress.items():
            arguments: list[Any] = [_key(name), _LEASES, _member(name), str(until_s), tokens]
            pipeline.eval(_RENEW, 2, *arguments)
        answers: list[Any] = await self._link.ask(pipeline.execute())
        return [name for name, is_renewed in zip(progress, answers, strict=True) if not is_renewed]

    async def finish(self, owner: str, response_id: str, status: Status, result: bytes) -> bool:
        return bool(await self._script(_FINISH, (owner, response_id), status, result, self._ttl_ms))

    async def delete(self, owner: str, response_id: str) -> bool:
        return bool(await self._script(_DELETE, (owner, response_id)))

    async def abandoned(self, most: int, skip: int = 0) -> list[ResponseName]:
        over = self._link.redis.zrangebyscore(_LEASES, "-inf", self._clock(), start=skip, num=most)
        members: list[bytes] = await self._link.ask(over)
        names = [tuple(member.decode().split(":", 1)) for member in members]
        return [(owner, response_id) for owner, response_id in names]

    async def purge(self) -> None:
        """Redis deletes expired responses itself. Their names leave the leases when a gateway next claims them."""

    async def _script(self, script: str, name: ResponseName, *values: Any) -> Any:
        return await self._link.script(script, [_key(name), _LEASES], _member(name), *values)


def _member(name: ResponseName) -> str:
    return f"{name[0]}:{name[1]}"


def _key(name: ResponseName) -> str:
    return _PREFIX + _member(name)
