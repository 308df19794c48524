"""The index of requests by block finds the same requests as a scan of all of them, with fewer looks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.core.arrays import packed
from scheduler_svc.core.requests.prefixes import PrefixIndex, common_blocks
from scheduler_svc.core.requests.request import Request

BLOCK = 2
TOKENS = st.lists(st.integers(0, 1), max_size=9)


@dataclass
class FakeRequest:
    tokens: list[int]
    looks: int = 0

    @property
    def token_ids(self) -> bytes:
        self.looks += 1
        return packed(self.tokens)


def as_request(fake: FakeRequest) -> Request:
    return cast(Request, fake)


Add = tuple[list[int], int]  # tokens; how many of them count
Ask = tuple[list[int], None]


@given(events=st.lists(st.tuples(TOKENS, st.none() | st.integers(0, 9)), max_size=30), depth=st.integers(0, 6))
def test_the_index_finds_the_same_requests_as_a_scan(events: list[Add | Ask], depth: int) -> None:
    index, added = PrefixIndex[Request](BLOCK), list[tuple[FakeRequest, int]]()
    for tokens, count in events:
        if count is not None:
            added.append((FakeRequest(tokens), min(count, len(tokens))))
            index.add(as_request(added[-1][0]), added[-1][1])
            continue
        wanted = tokens[depth : depth + BLOCK]
        expected = [
            (as_request(fake), n)
            for fake, n in added
            if n >= depth + BLOCK and fake.tokens[depth : depth + BLOCK] == wanted
        ]
        assert index.alike(as_request(FakeRequest(tokens)), depth) == expected


def test_each_request_is_read_once_for_a_depth() -> None:
    index = PrefixIndex[Request](BLOCK)
    held = [FakeRequest([i, i, i, i]) for i in range(100)]
    for fake in held:
        assert not index.alike(as_request(FakeRequest([1000, 0])), 0)
        index.add(as_request(fake), 4)
        assert index.alike(as_request(fake), 0)
    assert {fake.looks for fake in held} == {2}  # once in the index, and once as the request that asks


@given(one=TOKENS, other=TOKENS, same=TOKENS)
def test_the_common_blocks_of_two_prompts_are_found(one: list[int], other: list[int], same: list[int]) -> None:
    one, other = same + one, same + other
    high = min(len(one), len(other)) // BLOCK * BLOCK
    expected = max(n for n in range(0, high + 1, BLOCK) if one[:n] == other[:n])
    for low in range(0, expected + 1, BLOCK):
        assert common_blocks(packed(one), packed(other), low, high, BLOCK) == expected
