"""The folder for what can be made anew: captured programs, compiled kernels, measured layouts."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = "SEMKV_CACHE"
"""Environment variable that names it; default: `semkv` in XDG_CACHE_HOME, or in `.cache` at home."""


def cache_folder() -> Path:
    """Where entries lie; it may not exist yet. They may be deleted at any time."""
    if os.environ.get(FOLDER):
        return Path(os.environ[FOLDER]).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "semkv"
