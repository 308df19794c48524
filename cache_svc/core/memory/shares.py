"""How much of a memory tenants may have retained: blocks that are kept longer than others because a request said so.

A retention above DEFAULT_RETENTION belongs to the tenant that asked for it. A block that is retained keeps everything
before it from being evicted (children go first), so a tenant pays for the whole way from the root to the blocks that it
retains, and for each block once. At most `tenant_share` of a memory's blocks are kept so for one tenant, and at most
`total_share` for all of them: tenants are named by clients, and the rest serves all other requests.

What goes beyond falls back to DEFAULT_RETENTION, and is evicted like everything else: of the tenant's own retained
blocks those with the lowest priority, of equal ones those that were asked for first. Nothing is refused.

    claims   by tenant: 1 if the holding itself is retained for it, and 1 for each child that it has a claim on.
             A tenant pays for each holding on which it has a claim.
"""

from __future__ import annotations

from collections import Counter

from sortedcontainers import SortedDict

from cache_svc.core.tree.nodes import BlockResidency, PrefixNode, RetentionKey

TENANT_SHARE = 0.25
TOTAL_SHARE = 0.5


class TenantShare:
    """What one memory retains for one tenant."""

    __slots__ = ("name", "num_blocks", "retained", "shares")

    def __init__(self, name: str, shares: RetentionShares) -> None:
        self.name = name
        self.shares = shares
        self.num_blocks = 0  # that it pays for
        self.retained: SortedDict[RetentionKey, BlockResidency] = SortedDict()  # the first falls back first

    def add(self, residency: BlockResidency, turn: int) -> None:
        """The holding is retained for the tenant from now on."""
        residency.owner, residency.owner_key = self, (residency.retention, turn, -residency.node.end, residency.serial)
        self.retained[residency.owner_key] = residency
        self.claim(residency)

    def add_front(self, front: BlockResidency, back: BlockResidency) -> None:
        """A retained holding was split; the claims of the front part are there."""
        retention, turn, _, serial = back.owner_key
        front.owner, front.owner_key = self, (retention, turn, -front.node.end, serial)
        self.retained[front.owner_key] = front

    def absorb(self, residency: BlockResidency, below: BlockResidency) -> None:
        """Undo that: `below` becomes a part of the holding."""
        del self.retained[residency.owner_key]
        residency.owner_key = below.owner_key
        self.retained[residency.owner_key] = residency

    def release(self, residency: BlockResidency) -> None:
        """The holding is retained no more. `owner` still names this tenant."""
        if self.retained.get(residency.owner_key) is not residency:
            return
        del self.retained[residency.owner_key]
        self._disclaim(residency)
        if not self.retained:
            self.shares.tenants.pop(self.name, None)

    def claim(self, residency: BlockResidency, count: int = 1) -> None:
        """More claims on the holding; if they are the first, one more on the holding above."""
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
        """One claim less on the holding; if it was the last, one less on the holding above."""
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
        return self.retained.get(residency.owner_key) is residency


class RetentionShares:
    """All tenants of one memory, which `index` names, of so many blocks."""

    __slots__ = ("_turn", "index", "max_blocks", "max_tenant_blocks", "num_blocks", "orphans", "tenants")

    def __init__(self, index: int, num_blocks: int, tenant_share: float, total_share: float) -> None:
        self.index = index
        self.max_tenant_blocks = int(num_blocks * tenant_share)
        self.max_blocks = int(num_blocks * total_share)
        self.num_blocks = 0  # of all tenants; what several pay for counts for each
        self.tenants: dict[str, TenantShare] = {}
        self.orphans: dict[PrefixNode, Counter[TenantShare]] = {}  # claims of children of nodes that are not held here
        self._turn = 0

    def adopt(self, residency: BlockResidency) -> None:
        """The node of what is held from now on may have children with claims."""
        for share, count in self.orphans.pop(residency.node, {}).items():
            share.claim(residency, count)

    def next_turn(self) -> None:
        """What is retained from now on was asked for later than what was before."""
        self._turn += 1

    def retain(self, residency: BlockResidency, tenant: str, turn: int | None = None) -> None:
        """The holding has a retention above the default one, asked for now or in that turn."""
        share = self.tenants.get(tenant)
        if share is None:
            share = self.tenants[tenant] = TenantShare(tenant, self)
        share.add(residency, self._turn if turn is None else turn)

    def excess(self, share: TenantShare) -> int:
        """Blocks by which the tenant is beyond what it may have."""
        return max(share.num_blocks - self.max_tenant_blocks, self.num_blocks - self.max_blocks, 0)
