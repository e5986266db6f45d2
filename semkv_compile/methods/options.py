"""What the options of methods may be: types of fields that say so, which `Method` checks when one is made."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from semkv.runtime.prompt.record import OBSERVED_QUERIES


@dataclass(frozen=True)
class Allowed:
    """Which values an option takes: a test, and the same in words."""

    holds: Callable[[Any], bool]
    expected: str

    def __call__(self, value: Any) -> bool:
        """Whether `value` is one; what cannot be compared is none."""
        try:
            return bool(self.holds(value))
        except TypeError:
            return False


Share = Annotated[float, Allowed(lambda x: 0 < x <= 1, "a share in (0, 1]")]
ShareOrBudget = Annotated[float, Allowed(lambda x: 0 <= x <= 1, "a share in (0, 1], or 0 for one by the budget")]
Inner = Annotated[float, Allowed(lambda x: 0 < x < 1, "a share between 0 and 1")]
Overlap = Annotated[float, Allowed(lambda x: 0 <= x <= 1, "an overlap in (0, 1], or 0 for the profile's own")]
AboveZero = Annotated[float, Allowed(lambda x: 0 < x < math.inf, "a positive number")]
FromZero = Annotated[float, Allowed(lambda x: 0 <= x < math.inf, "a number of at least 0")]
FromOne = Annotated[float, Allowed(lambda x: 1 <= x < math.inf, "a number of at least 1")]
Tokens = Annotated[int, Allowed(lambda x: x >= 1, "at least 1 token")]
TokensOrNone = Annotated[int, Allowed(lambda x: x >= 0, "at least 0 tokens")]
Count = Annotated[int, Allowed(lambda x: x >= 1, "at least 1")]
CountOrNone = Annotated[int, Allowed(lambda x: x >= 0, "at least 0")]
CountOrProfile = Annotated[int, Allowed(lambda x: x >= 0, "at least 1, or 0 for the profile's own")]
Queries = Annotated[int, Allowed(lambda x: 1 <= x <= OBSERVED_QUERIES, f"1 to {OBSERVED_QUERIES} queries")]
Width = Annotated[int, Allowed(lambda x: x >= 1 and x % 2 == 1, "an odd width")]
IndexBits = Annotated[int, Allowed(lambda x: x in (4, 8, 16), "4, 8 or 16")]
MeanBits = Annotated[int, Allowed(lambda x: x in (4, 8, 16), "4, 8 or 16")]
