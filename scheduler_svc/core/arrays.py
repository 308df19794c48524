"""Arrays over slots."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Slots = npt.NDArray[np.intp]  # slot numbers in NumPy's index type; another type is converted at each use
Longs = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.int32]  # token ids


def packed(numbers: Iterable[int]) -> bytes:
    """Packed int32, as messages carry the numbers."""
    return array("i", numbers).tobytes()


def unpacked(numbers: bytes) -> list[int]:
    return array("i", numbers).tolist()
