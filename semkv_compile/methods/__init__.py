"""The methods, by name. Each is a short composition of components; see docs/methods.md."""

from __future__ import annotations

from semkv.errors import ConfigError
from semkv.methods.base import Method
from semkv.methods.cake import CAKE
from semkv.methods.chunkkv import ChunkKV
from semkv.methods.clusterkv import ClusterKV
from semkv.methods.compresskv import CompressKV
from semkv.methods.full import Full
from semkv.methods.h2o import H2O
from semkv.methods.heterocache import HeteroCache
from semkv.methods.indexer import Indexer
from semkv.methods.infllm import InfLLM
from semkv.methods.mixed import Mixed
from semkv.methods.omnikv import OmniKV
from semkv.methods.pyramidkv import PyramidKV
from semkv.methods.quest import Quest
from semkv.methods.sekv import SeKV
from semkv.methods.semantic_clusters import delimiter_ids
from semkv.methods.semanticache import SemantiCache
from semkv.methods.sentencekv import SentenceKV
from semkv.methods.shadowkv import ShadowKV
from semkv.methods.sketch import Sketch
from semkv.methods.snapkv import SnapKV
from semkv.methods.specontext import SpeContext
from semkv.methods.streaming_llm import StreamingLLM

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (
        Full,
        StreamingLLM,
        SnapKV,
        SeKV,
        Quest,
        ShadowKV,
        InfLLM,
        ClusterKV,
        Sketch,
        H2O,
        PyramidKV,
        ChunkKV,
        CAKE,
        SemantiCache,
        CompressKV,
        SentenceKV,
        HeteroCache,
        OmniKV,
        SpeContext,
        Mixed,
        Indexer,
    )
}


def find_method(name: str, options: dict | None = None) -> Method:
    """The method called `name` with `options` set; `ConfigError` lists the names there are."""
    if name not in METHODS:
        raise ConfigError(f"unknown method {name!r}; there are: {', '.join(METHODS)}")
    return METHODS[name]().with_options(options or {})


__all__ = [
    "CAKE",
    "H2O",
    "METHODS",
    "ChunkKV",
    "CompressKV",
    "Full",
    "HeteroCache",
    "Method",
    "Mixed",
    "OmniKV",
    "PyramidKV",
    "Quest",
    "SeKV",
    "SemantiCache",
    "SentenceKV",
    "SnapKV",
    "SpeContext",
    "StreamingLLM",
    "delimiter_ids",
    "find_method",
]
