"""How many blocks each tenant may retain in one memory, that is, keep longer than other blocks.

A retention above DEFAULT_RETENTION belongs to the tenant that asked for it. A retained block keeps all blocks before it
from being evicted, because children go first. So a tenant pays for the whole path from the root to its retained blocks,
and for each block once. Limits: `tenant_share` of a memory's blocks for one tenant, and `total_share` for all tenants
together. Clients choose tenant names freely, so the second limit protects all other requests.

If a request exceeds one of the two limits, retentions of its own tenant end: those with the lowest priority first, and
among equal ones those that were requested first. The blocks then have DEFAULT_RETENTION. No request is refused.

    claims   by tenant: 1 if the residency itself is retained for it, plus 1 for each child on which it has a claim.
             A tenant pays for each residency on which it has a claim.
"""

from __future__ import annotations

from collections import Counter

from sortedcontainers import SortedDict

from cache_svc.core.tree.nodes import BlockResidency, PrefixNode, RetentionKey

TENANT_SHARE = 0.25
TOTAL_SHARE = 0.5


class TenantShare:
    """The blocks that one memory retains for one tenant."""

    __slots__ = ("name", "num_blocks", "retained", "shares")

    def __init__(self, name: str, shares: RetentionShares) -> None:
        self.name = name
        self.shares = shares
        self.num_blocks = 0  # the blocks that it pays for
        self.retained: SortedDict[RetentionKey, BlockResidency] = SortedDict()  # in the order in which retentions end

    def add(self, residency: BlockResidency, turn: int) -> None:
        """Retains the residency for the tenant."""
        residency.owner, residency.owner_key = self, (residency.retention, turn, -residency.node.end, residency.serial)
        self.retained[residency.owner_key] = residency
        self.claim(residency)

    def add_front(self, front: BlockResidency, back: BlockResidency) -> None:
        """A retained residency was split. `front` has its claims already."""
        retention, turn, _, serial = back.owner_key
        front.owner, front.owner_key = self, (retention, turn, -front.node.end, serial)
        self.retained[front.owner_key] = front

    def absorb(self, residency: BlockResidency, below: BlockResidency) -> None:
        """Undoes add_front: `below` becomes a part of the residency."""
        del self.retained[residency.owner_key]
        residency.owner_key = below.owner_key
        self.retained[residency.owner_key] = residency

    def release(self, residency: BlockResidency) -> None:
        """Ends the retention of the residency. `owner` still names this tenant."""
        if self.retained.get(residency.owner_key) is not residency:
            return
        del self.retained[residency.owner_key]
        self._disclaim(residency)
        if not self.retained:
            self.shares.tenants.pop(self.name, None)

    def claim(self, residency: BlockResidency, count: int = 1) -> None:
        """Adds claims to the residency. If they are its first ones, adds one to the residency above."""
        shares = self.shares
        while True:
            if residency.claims is None:
                residency.claims = {}
            before = residency.claims.get(self, 0)
            residency.claims[self] = before + count
            if before:
                return
            self.num_blocks += len(residency.blocks)
            shares.num_blocks += len(residency.blocks)
            parent, count = residency.node.parent, 1
            if parent is None or parent.parent is None:
                return
            above = parent.residencies.get(shares.index)
            if above is None:
                shares.orphans.setdefault(parent, Counter())[self] += 1
                return
            residency = above

    def _disclaim(self, residency: BlockResidency) -> None:
        """Removes one claim from the residency. If it was the last one, removes one from the residency above."""
        shares = self.shares
        while True:
            assert residency.claims is not None
            residency.claims[self] -= 1
            if residency.claims[self]:
                return
            del residency.claims[self]
            self.num_blocks -= len(residency.blocks)
            shares.num_blocks -= len(residency.blocks)
            parent = residency.node.parent
            if parent is None or parent.parent is None:
                return
            above = parent.residencies.get(shares.index)
            if above is None:
                orphans = shares.orphans[parent]
                orphans[self] -= 1
                if not orphans[self]:
                    del orphans[self]
                if not orphans:
                    del shares.orphans[parent]
                return
            residency = above

    def is_retained(self, residency: BlockResidency) -> bool:
        """Whether the tenant retains the residency."""
        return self.retained.get(residency.owner_key) is residency


class RetentionShares:
    """The shares of all tenants in one memory."""

    __slots__ = ("_turn", "index", "max_blocks", "max_tenant_blocks", "num_blocks", "orphans", "tenants")

    def __init__(self, index: int, num_blocks: int, tenant_share: float, total_share: float) -> None:
        self.index = index
        self.max_tenant_blocks = int(num_blocks * tenant_share)
        self.max_blocks = int(num_blocks * total_share)
        self.num_blocks = 0  # of all tenants; a block that several tenants pay for counts for each
        self.tenants: dict[str, TenantShare] = {}
        self.orphans: dict[PrefixNode, Counter[TenantShare]] = {}  # parent not held here -> claims of its children
        self._turn = 0

    def adopt(self, residency: BlockResidency) -> None:
        """The residency is new. It takes over the claims of its node's children."""
        for share, count in self.orphans.pop(residency.node, {}).items():
            share.claim(residency, count)

    def next_turn(self) -> None:
        """Retentions from now on count as requested later than those before."""
        self._turn += 1

    def retain(self, residency: BlockResidency, tenant: str) -> None:
        """Retains the residency for a tenant."""
        share = self.tenants.get(tenant)
        if share is None:
            share = self.tenants[tenant] = TenantShare(tenant, self)
        share.add(residency, self._turn)

    def excess(self, share: TenantShare) -> int:
        """The number of blocks by which the tenant exceeds its limits."""
        return max(share.num_blocks - self.max_tenant_blocks, self.num_blocks - self.max_blocks, 0)
