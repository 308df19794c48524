"""The cost of an eviction depends on the evicted blocks only, not on the rest of the tree.

The tests count executed bytecodes, which do not change with the machine's load or memory latency.
"""

from __future__ import annotations

import gc
import sys
from types import FrameType

import numpy as np
import pytest

from cache_svc.core.memory.eviction import STRATEGIES
from cache_svc.core.memory.host import HostMemory
from cache_svc.core.memory.memory import Memory
from cache_svc.core.tree.nodes import Namespace
from cache_svc.core.tree.tree import PrefixTree

BLOCK_SIZE, RUN, EVICTED = 16, 16, 64  # tokens per block; own blocks of a sequence; blocks evicted at once
FEW, MANY = 250, 4_000  # sequences


def filled(eviction: str, num_sequences: int) -> Memory:
    """A memory full of unused sequences, each after one of four system prompts."""
    tree = PrefixTree(BLOCK_SIZE)
    root = tree.acquire_root(Namespace())
    memory = Memory(0, tree, (num_sequences + 4) * RUN, True, eviction)
    rng = np.random.default_rng(1)
    runs = [row.tobytes() for row in rng.integers(0, 1 << 30, (num_sequences + 4, RUN * BLOCK_SIZE), np.int32)]
    prompts = [tree.grow(root, run) for run in runs[:4]]
    for prompt in prompts:
        memory.hold(prompt, memory.take(RUN))
    for place, run in enumerate(runs[4:]):
        prompt = prompts[place % 4]
        memory.use(prompt.residencies[0])
        leaf = tree.grow(prompt, run)
        memory.hold(leaf, memory.take(RUN), priority=place % 7)
        memory.leave_path(leaf)
    for prompt in prompts:
        memory.leave_path(prompt)
    return memory


def bytecodes(memory: Memory, num_blocks: int = EVICTED) -> int:
    """How many bytecodes run to evict `num_blocks` blocks."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> object:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    gc.disable()  # hypothesis runs a callback at each collection
    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        blocks = memory.take(num_blocks)
    finally:
        sys.settrace(before)
        gc.enable()
    assert len(blocks) == num_blocks
    return count


@pytest.mark.parametrize("eviction", STRATEGIES)
def test_the_cost_does_not_depend_on_the_size_of_the_tree(eviction: str) -> None:
    few, many = filled(eviction, FEW), filled(eviction, MANY)
    for memory in (few, many):
        assert memory.free_blocks == 0
        assert memory.cached_blocks == memory.num_blocks
        memory.take(EVICTED)  # with fifo the queue sets the prompts aside here (eviction.py), before the measurement
    costs = [bytecodes(few) for _ in range(10)], [bytecodes(many) for _ in range(10)]
    assert sum(costs[1]) <= 1.1 * sum(costs[0])
    if eviction == "lru":
        assert costs[1] == costs[0]


@pytest.mark.parametrize("eviction", STRATEGIES)
def test_the_cost_of_demoting_does_not_depend_on_other_continuations(eviction: str) -> None:
    costs = []
    for others in (FEW, MANY):
        tree = PrefixTree(BLOCK_SIZE)
        root = tree.acquire_root(Namespace())
        device, elsewhere = (Memory(index, tree, 2 * others, True, eviction) for index in (0, 2))
        host = device.lower = HostMemory(1, 0, tree, EVICTED, eviction)
        prompt = tree.grow(root, np.zeros(BLOCK_SIZE, np.int32).tobytes())
        elsewhere.hold(prompt, elsewhere.take(1))
        for place in range(others):
            behind = tree.grow(prompt, np.full(BLOCK_SIZE, place, np.int32).tobytes())
            elsewhere.hold(behind, elsewhere.take(1))
        own = next(iter(prompt.children.values()))
        for node in (prompt, own):
            device.hold(node, device.take(1))
        device.leave_path(own)
        device.take(device.free_blocks)
        costs.append(bytecodes(device, 1) + bytecodes(device, 1))
        assert prompt.residencies[host.index].num_children == 1
        assert not host.orphans
    assert costs[0] == costs[1]
