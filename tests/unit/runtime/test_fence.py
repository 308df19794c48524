"""Which epochs a fence accepts, and how an epoch travels as metadata."""

from __future__ import annotations

import pytest

from services.runtime.fence import METADATA_KEY, Fence, StaleScheduler, from_metadata, to_metadata


def test_a_worker_that_has_seen_a_later_leader_refuses_an_earlier_one() -> None:
    fence = Fence()
    for epoch in (0, 3, 3, 7):
        fence.check(epoch)
    for epoch in (0, 3, 6):
        with pytest.raises(StaleScheduler, match="there was a leader of epoch 7"):
            fence.check(epoch)
    fence.check(7)


@pytest.mark.parametrize("epoch", [0, 1, 2**64 - 1])
def test_an_epoch_travels_as_metadata(epoch: int) -> None:
    assert from_metadata([("other", b"1"), *to_metadata(epoch)]) == epoch


@pytest.mark.parametrize("value", ["", "-1", "1.0", "²", b"1", str(2**64), "0" * 30 + "9" * 30, "9" * 5000])
def test_an_invalid_epoch_is_refused(value: str | bytes) -> None:
    with pytest.raises(ValueError, match="must be a number of 64 bits"):
        from_metadata([(METADATA_KEY, value)])
