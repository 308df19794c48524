"""Which requests share cached KV: namespaces by tenant and `cache_salt`, under a name that only the scheduler can make.

The name of a namespace is a hash with the scheduler's secret as its key. Workers and the cache get only the name. They
cannot find the tenant or the salt, not even by hashing every possible value. (The cache gets the tenant of a request
with retention, for the tenant's share.) The scheduler makes the name, because every request passes through the
scheduler, whichever gateway or client it comes from. A restarted scheduler and a standby make the same names if they
have the same secret, and so they find the KV that a worker kept.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from hashlib import blake2b

from scheduler_svc.core.types import CacheScope

NAME_BYTES = 16  # two namespaces have the same name with a probability of 2^-128
MIN_SECRET_BYTES = 16
MAX_SECRET_BYTES = blake2b.MAX_KEY_SIZE
# The live view shows only this many characters of a namespace's name. A viewer cannot use these as the name.
SHOWN_CHARS = 16
MAX_OWNERS = 1024
_PERSON = b"paceline-cache"  # keeps these hashes apart from hashes made with the same secret for another purpose


@dataclass(slots=True)
class CacheNamespaces:
    """`scope` tenant: only requests of one tenant share KV. server: requests of all tenants do. The `secret` may be set
    until the first request. It has no bytes in simulations, where nothing has to be hidden."""

    scope: CacheScope = "tenant"
    secret: bytes = field(default=b"", repr=False)
    num_owners: int = 0  # entries ever added to `_owners`
    # Tenants by the first SHOWN_CHARS characters of their namespaces' names: the last MAX_OWNERS new ones.
    _owners: dict[str, str] = field(default_factory=dict, repr=False)

    def name(self, tenant: str, cache_salt: str) -> str:
        """What goes over the wire as `cache_salt`. Empty if nothing has to be kept apart: there is no salt, and there
        is no tenant or the scope is server."""
        owner = tenant.encode() if self.scope == "tenant" else b""
        if not (owner or cache_salt):
            return ""
        digest = blake2b(digest_size=NAME_BYTES, key=self.secret, person=_PERSON)
        digest.update(len(owner).to_bytes(4, "little"))  # ("ab", "c") is not ("a", "bc")
        digest.update(owner)
        digest.update(cache_salt.encode())
        name = digest.hexdigest()
        if owner and (shown := name[:SHOWN_CHARS]) not in self._owners:
            self._owners[shown] = tenant
            self.num_owners += 1
            if len(self._owners) > MAX_OWNERS:
                del self._owners[next(iter(self._owners))]
        return name

    def owners_since(self, num_owners: int) -> list[tuple[str, str]]:
        """The shown names of namespaces and their tenants, since `num_owners` had this value, the oldest first."""
        new = min(self.num_owners - num_owners, len(self._owners))
        return list(itertools.islice(self._owners.items(), len(self._owners) - new, None))

    def reported_tokens(self, num_cached_tokens: int, block_size: int) -> int:
        """The cached tokens that a client may know. With scope server whole blocks only: an exact number would tell how
        far a guessed prompt agrees with the prompt of another tenant, token by token."""
        return num_cached_tokens if self.scope == "tenant" else num_cached_tokens - num_cached_tokens % block_size
