"""Counter-based random numbers: a token's number depends on its sequence's seed and its position, on nothing else."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """One number in (0, 1) for each row: splitmix64 of the seed's own stream at the position.

    2**32 values, each half a step off the ends: times a sum of probabilities it never reaches the sum.
    """
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is the point
        streams = _mix(seeds + _GOLDEN)
        bits = _mix(streams + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return ((bits >> np.uint64(32)).astype(np.float64) + 0.5) / 2.0**32


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
