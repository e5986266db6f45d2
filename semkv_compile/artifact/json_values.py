"""Values of configurations as JSON holds them, and back."""

from __future__ import annotations

import math
from typing import Any

NUMBER, NUMBERS = "number", ("inf", "-inf", "nan")
"""The one key of a number that JSON has not, and what there is."""


def plain(value: Any) -> Any:
    """What JSON can hold of a value; the rest in words, and infinite numbers under a name."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {NUMBER: str(value)}
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def restored(value: Any) -> Any:
    """The value that `plain` wrote."""
    if isinstance(value, dict):
        if value.keys() == {NUMBER} and value[NUMBER] in NUMBERS:
            return float(value[NUMBER])
        return {key: restored(item) for key, item in value.items()}
    return [restored(item) for item in value] if isinstance(value, list) else value
