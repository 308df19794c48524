"""Keeps documents in Redis or Valkey.

Keys (an owner has no colon):

    paceline:document:KIND:OWNER:ID   hash: label, created, expires, bytes, data, version; lease while there is work
    paceline:pieces:KIND:OWNER:ID     hash: data by number
    paceline:marks:KIND:OWNER:ID      hash: mark by number
    paceline:documents:KIND:OWNER     sorted set: ids by time
    paceline:unfinished:KIND:OWNER    set: ids of documents with work
    paceline:work:KIND:LABEL          sorted set: OWNER:ID of documents with work, by the end of their leases

Scripts change related keys in one atomic step. Redis deletes expired documents and their pieces. A document's name
leaves the sets when a gateway next reads it there. The sets of an owner live as long as the owner's document with the
latest expiry. The hash has a field `holder`, too, from the first claim on: the gateway that has, or had, the lease.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from services.gateway.store.documents import ContentPiece, Document, DocumentKind, DocumentName, StoreUsage
from services.gateway.store.redis_link import RedisLink

_LOOKED_AT = 256  # documents that are read at once for a page
_MOST_WAITING = 10_000  # names that are read to find the first one of each owner
# KEYS of all scripts: document, pieces, marks, documents, unfinished, work. ARGV begins with the id and OWNER:ID.
# The sets of an owner expire with its document of the latest expiry. PEXPIRE with NX, and then with GT, does the same,
# but has these options only since Redis 7.0.
_KEEP = """
for i = 4, 5 do
  if redis.call('PTTL', KEYS[i]) < tonumber(ARGV[3]) then redis.call('PEXPIRE', KEYS[i], ARGV[3]) end
end
"""
_PUT = f"""
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
redis.call('HSET', KEYS[1], unpack(ARGV, 6))
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('ZADD', KEYS[4], ARGV[4], ARGV[1])
if ARGV[5] ~= '' then
  redis.call('HSET', KEYS[1], 'lease', ARGV[5])
  redis.call('ZADD', KEYS[6], ARGV[5], ARGV[2])
  redis.call('SADD', KEYS[5], ARGV[1])
end
{_KEEP}
return 1
"""
_FORGET = """
redis.call('ZREM', KEYS[6], ARGV[2])
redis.call('SREM', KEYS[5], ARGV[1])
"""
_REPLACE = f"""
if redis.call('HGET', KEYS[1], 'version') ~= ARGV[5] then return 0 end
redis.call('HSET', KEYS[1], 'version', ARGV[5] + 1, unpack(ARGV, 6))
for i = 1, 3 do redis.call('PEXPIRE', KEYS[i], ARGV[3]) end
{_KEEP}
if ARGV[4] == '1' then
  redis.call('HDEL', KEYS[1], 'lease')
  {_FORGET}
end
return 1
"""
_DELETE = f"""
{_FORGET}
redis.call('ZREM', KEYS[4], ARGV[1])
redis.call('DEL', KEYS[2], KEYS[3])
return redis.call('DEL', KEYS[1])
"""
_ADD = """
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
local added = 0
for i = 3, #ARGV, 3 do
  if redis.call('HSETNX', KEYS[3], ARGV[i], ARGV[i + 1]) == 1 then
    redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 2])
    added = added + 1
  end
end
for i = 2, 3 do redis.call('PEXPIRE', KEYS[i], redis.call('PTTL', KEYS[1])) end
return added
"""
_CLAIM = f"""
local lease = redis.call('HGET', KEYS[1], 'lease')
if not lease then
  {_FORGET}
  return 0
end
if tonumber(lease) > tonumber(ARGV[3]) then return 0 end
redis.call('HSET', KEYS[1], 'lease', ARGV[4], 'holder', ARGV[5])
redis.call('ZADD', KEYS[6], ARGV[4], ARGV[2])
return 1
"""
_RENEW = """
if redis.call('HEXISTS', KEYS[1], 'lease') == 0 then return 0 end
if redis.call('HGET', KEYS[1], 'holder') ~= ARGV[4] then return 0 end
redis.call('HSET', KEYS[1], 'lease', ARGV[3])
redis.call('ZADD', KEYS[6], ARGV[3], ARGV[2])
return 1
"""
_FIELDS = ("label", "created", "expires", "bytes", "data", "version")


class RedisDocuments:
    """The DocumentStore of gateways on several machines."""

    def __init__(self, link: RedisLink, *, clock: Callable[[], float] = time.time) -> None:
        self._link = link
        self._clock = clock
        self._holder = uuid.uuid4().hex

    async def put(self, document: Document, *, has_work: bool = False) -> bool:
        fields: dict[str, Any] = {"created": document.created_s, "version": document.version, **_changing(document)}
        flat = [part for field in fields.items() for part in field]
        lease = self._clock() if has_work else ""
        return bool(
            await self._script(
                _PUT, document.name, document.label, self._ttl_ms(document), document.created_s, lease, *flat
            )
        )

    async def get(self, name: DocumentName) -> Document | None:
        [document] = await self._read([name])
        return document

    async def page(
        self,
        kind: DocumentKind,
        owner: str,
        labels: Sequence[str],
        *,
        after: Document | None = None,
        most: int,
        newest_first: bool = True,
    ) -> list[Document]:
        redis, ask, key = self._link.redis, self._link.ask, _index(kind, owner)
        start = 0
        if after is not None:
            # By time and id, because the document may have been deleted or have expired since the caller read it.
            at_s, own = after.created_s, after.name.id.encode()
            same = await ask(redis.zrangebyscore(key, at_s, at_s))
            if newest_first:
                start = await ask(redis.zcount(key, f"({at_s!r}", "+inf")) + sum(id_ >= own for id_ in same)
            else:
                start = await ask(redis.zcount(key, "-inf", f"({at_s!r}")) + sum(id_ <= own for id_ in same)
        found: list[Document] = []
        while len(found) < most:
            ids = await ask(redis.zrange(key, start, start + _LOOKED_AT - 1, desc=newest_first))
            names = [DocumentName(kind, owner, id_.decode()) for id_ in ids]
            documents = await self._read(names)
            found += [each for each in documents if each is not None and (not labels or each.label in labels)]
            if expired := [name.id for name, each in zip(names, documents, strict=True) if each is None]:
                await ask(redis.zrem(key, *expired))
            if len(ids) < _LOOKED_AT:
                break
            start += _LOOKED_AT - len(expired)
        return found[:most]

    async def usage(self, kind: DocumentKind, owner: str) -> StoreUsage:
        redis, ask, key = self._link.redis, self._link.ask, _index(kind, owner)
        ids = await ask(redis.zrange(key, 0, -1))
        pipeline = redis.pipeline(transaction=False)
        for id_ in ids:
            pipeline.hget(_key("document", DocumentName(kind, owner, id_.decode())), "bytes")
        found = await ask(pipeline.execute())
        if expired := [id_ for id_, size in zip(ids, found, strict=True) if size is None]:
            await ask(redis.zrem(key, *expired))
        sizes = [int(size) for size in found if size is not None]
        return StoreUsage(len(sizes), sum(sizes))

    async def replace(self, document: Document, *, ends_work: bool = False) -> bool:
        flat = [part for field in _changing(document).items() for part in field]
        return bool(
            await self._script(
                _REPLACE, document.name, document.label, self._ttl_ms(document), int(ends_work), document.version, *flat
            )
        )

    async def delete(self, name: DocumentName) -> bool:
        return bool(await self._script(_DELETE, name, await self._label(name)))

    async def add_pieces(self, name: DocumentName, pieces: Sequence[ContentPiece]) -> int:
        return int(await self._script(_ADD, name, "", *(part for piece in pieces for part in piece)))

    async def marks(self, name: DocumentName) -> Mapping[int, int]:
        found = await self._link.ask(self._link.redis.hgetall(_key("marks", name)))
        return {int(number): int(mark) for number, mark in found.items()}

    async def pieces(self, name: DocumentName, numbers: Sequence[int]) -> list[bytes]:
        if not numbers:
            return []
        found = await self._link.ask(self._link.redis.hmget(_key("pieces", name), list(map(str, numbers))))
        return [data for data in found if data is not None]

    async def drop_pieces(self, name: DocumentName) -> None:
        await self._link.ask(self._link.redis.delete(_key("pieces", name), _key("marks", name)))

    async def waiting(self, kind: DocumentKind, label: str, most: int) -> list[DocumentName]:
        over = self._link.redis.zrangebyscore(_work(kind, label), "-inf", self._clock(), start=0, num=_MOST_WAITING)
        first: dict[str, str] = {}  # by owner: the id of the document that has waited longest
        for member in await self._link.ask(over):
            first.setdefault(*member.decode().split(":", 1))
        names = [DocumentName(kind, *member) for member in list(first.items())[:most]]
        documents = await self._read(names)
        if expired := [f"{name.owner}:{name.id}" for name, each in zip(names, documents, strict=True) if each is None]:
            await self._link.ask(self._link.redis.zrem(_work(kind, label), *expired))
        return [document.name for document in documents if document is not None]

    async def unfinished(self, kind: DocumentKind, owner: str) -> list[str]:
        redis, ask, key = self._link.redis, self._link.ask, _unfinished(kind, owner)
        ids = sorted(await ask(redis.smembers(key)))
        documents = await self._read([DocumentName(kind, owner, id_.decode()) for id_ in ids])
        if expired := [id_ for id_, each in zip(ids, documents, strict=True) if each is None]:
            await ask(redis.srem(key, *expired))
        return [document.name.id for document in documents if document is not None]

    async def claim(self, name: DocumentName, lease_s: float) -> bool:
        now_s = self._clock()
        return bool(await self._script(_CLAIM, name, await self._label(name), now_s, now_s + lease_s, self._holder))

    async def renew(self, names: Sequence[DocumentName], lease_s: float) -> list[DocumentName]:
        until_s = self._clock() + lease_s

        async def is_renewed(name: DocumentName) -> bool:
            return bool(await self._script(_RENEW, name, await self._label(name), until_s, self._holder))

        return [name for name in names if not await is_renewed(name)]

    async def purge(self) -> None:
        """Redis deletes documents itself."""

    def _ttl_ms(self, document: Document) -> int:
        return max(1, int(1000 * (document.expires_s - self._clock())))

    async def _label(self, name: DocumentName) -> str:
        label = await self._link.ask(self._link.redis.hget(_key("document", name), "label"))
        return "" if label is None else cast(bytes, label).decode()

    async def _read(self, names: Sequence[DocumentName]) -> list[Document | None]:
        if not names:
            return []
        pipeline = self._link.redis.pipeline(transaction=False)
        for name in names:
            pipeline.hmget(_key("document", name), list(_FIELDS))
        rows = await self._link.ask(pipeline.execute())
        return [self._document(name, *row) for name, row in zip(names, rows, strict=True)]

    def _document(self, name: DocumentName, label: bytes | None, *rest: bytes) -> Document | None:
        if label is None:
            return None
        created, expires, num_bytes, data, version = rest
        if float(expires) <= self._clock():
            return None
        return Document(name, label.decode(), float(created), float(expires), int(num_bytes), data, int(version))

    async def _script(self, script: str, name: DocumentName, label: str, *values: Any) -> Any:
        kind, owner, id_ = name
        keys = [*(_key(part, name) for part in ("document", "pieces", "marks")), _index(kind, owner)]
        keys += [_unfinished(kind, owner), _work(kind, label)]
        return await self._link.script(script, keys, id_, f"{owner}:{id_}", *values)


def _changing(document: Document) -> dict[str, Any]:
    """The fields that replace() stores."""
    return {"label": document.label, "expires": document.expires_s, "bytes": document.num_bytes, "data": document.data}


def _key(part: str, name: DocumentName) -> str:
    return f"paceline:{part}:{name.kind}:{name.owner}:{name.id}"


def _index(kind: DocumentKind, owner: str) -> str:
    return f"paceline:documents:{kind}:{owner}"


def _unfinished(kind: DocumentKind, owner: str) -> str:
    return f"paceline:unfinished:{kind}:{owner}"


def _work(kind: DocumentKind, label: str) -> str:
    return f"paceline:work:{kind}:{label}"
