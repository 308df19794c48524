"""The JSON of the cache in the live view. WatchBlocks in protos/paceline/v1/cache.proto says what the fields mean."""

from __future__ import annotations

from pydantic import BaseModel


class BlockMap(BaseModel):
    """The blocks of one worker. A character of `cells` stands for `blocks_per_cell` blocks, and shows the most used one
    of them: `.` free, `c` cached without a user, `u` used by one sequence, `s` shared by several, `p` pinned.
    `host_cells`: the same for its host memory, with `host_blocks_per_cell`."""

    worker: int
    name: str
    num_blocks: int
    blocks_per_cell: int
    cells: str
    num_host_blocks: int
    host_blocks_per_cell: int
    host_cells: str


class TreeNode(BaseModel):
    """A run of cached tokens after those of its parent. `saved_tokens`: tokens of it that sequences have reused.
    `tenant`: empty if its requests have none, or if the scheduler does not know it any more. `num_users`: running
    sequences and pins that use it."""

    id: int
    parent: int | None
    tenant: str
    num_tokens: int
    num_blocks: int
    workers: list[int]
    num_users: int
    num_hits: int
    saved_tokens: int
    age_s: float
    pinned: bool


class PrefixTreeView(BaseModel):
    """The nodes with the most saved tokens and their ancestors, parents first. Totals are of the whole tree."""

    nodes: list[TreeNode]
    num_nodes: int
    num_tokens: int


class CacheView(BaseModel):
    """The cache. `prefix_query_tokens`: tokens of the sequences admitted since its start. `prefix_hit_tokens`: how many
    of them were reused."""

    num_workers: int
    prefix_hit_tokens: int
    prefix_query_tokens: int
    maps: list[BlockMap]
    tree: PrefixTreeView
