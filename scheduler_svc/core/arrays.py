"""Arrays over slots."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Slots = npt.NDArray[np.int32]  # slot numbers
Longs = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.int32]  # token ids
