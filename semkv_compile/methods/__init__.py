"""The methods, by name. Each is a short composition of components; see docs/methods.md."""

from __future__ import annotations

from semkv.errors import ConfigError
from semkv.methods.base import Method
from semkv.methods.full import Full
from semkv.methods.sekv import SeKV
from semkv.methods.snapkv import SnapKV
from semkv.methods.streaming_llm import StreamingLLM

METHODS: dict[str, type[Method]] = {method.name: method for method in (Full, StreamingLLM, SnapKV, SeKV)}


def find_method(name: str, options: dict | None = None) -> Method:
    """The method called `name` with `options` set; `ConfigError` lists the names there are."""
    if name not in METHODS:
        raise ConfigError(f"unknown method {name!r}; there are: {', '.join(METHODS)}")
    return METHODS[name]().with_options(options or {})


__all__ = ["METHODS", "Full", "Method", "SeKV", "SnapKV", "StreamingLLM", "find_method"]
