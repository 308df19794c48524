"""Types of options with their ranges; the registry checks a value against them before the policy sees it."""

from typing import Annotated

from pydantic import Field

MOST = 2**31 - 1  # for counts of tokens or steps, so that NumPy can count them too

Count = Annotated[int, Field(ge=0, le=MOST)]
Positive = Annotated[int, Field(ge=1, le=MOST)]
AtLeastMinusOne = Annotated[int, Field(ge=-1, le=MOST)]
# Far from the limits of floating point: sums and quotients stay finite, and different values stay different.
Amount = Annotated[float, Field(ge=0, le=1e9)]
PositiveAmount = Annotated[float, Field(ge=1e-9, le=1e9)]
Share = Annotated[float, Field(ge=0, lt=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
