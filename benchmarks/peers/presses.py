"""The presses of kvpress that are compared, each with its own defaults; runs in the environment of kvpress."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvpress import (
    AdaKVPress,
    BasePress,
    ChunkKVPress,
    CriticalAdaKVPress,
    CriticalKVPress,
    DuoAttentionPress,
    ExpectedAttentionPress,
    KeyDiffPress,
    KnormPress,
    KVzipPress,
    LagKVPress,
    PyramidKVPress,
    SnapKVPress,
    StreamingLLMPress,
    TOVAPress,
)


class KVzipScoredOnce(KVzipPress):
    """KVzip for several ratios of one context: its scores, which cost it most, do not depend on the ratio."""

    scores: Any = None

    def _perform_kvzip_compression(self, model: Any, tokenizer: Any) -> None:
        if self.scores is None:
            super()._perform_kvzip_compression(model, tokenizer)
        else:
            self.score_val = self.scores
            self.compress_post(model)

    def compress_post(self, model: Any) -> None:
        self.scores = self.score_val
        super().compress_post(model)


def set_ratio(press: BasePress, ratio: float) -> None:
    """Have `press` remove this share of the key-value pairs; for DuoAttention it is a share of the heads."""
    setattr(press, "head_compression_ratio" if isinstance(press, DuoAttentionPress) else "compression_ratio", ratio)


PRESSES: dict[str, Callable[[], BasePress]] = {
    "snapkv": lambda: SnapKVPress(),
    "snapkv (window 32, kernel 7)": lambda: SnapKVPress(window_size=32, kernel_size=7),
    "pyramidkv": lambda: PyramidKVPress(),
    "pyramidkv (window 8)": lambda: PyramidKVPress(window_size=8),
    "chunkkv": lambda: ChunkKVPress(SnapKVPress()),
    "chunkkv (window 8, chunk 10)": lambda: ChunkKVPress(SnapKVPress(window_size=8), chunk_length=10),
    "streaming_llm": lambda: StreamingLLMPress(),
    "tova": lambda: TOVAPress(),
    "knorm": lambda: KnormPress(),
    "keydiff": lambda: KeyDiffPress(),
    "lagkv": lambda: LagKVPress(),
    "expected_attention": lambda: ExpectedAttentionPress(),
    "adakv, snapkv": lambda: AdaKVPress(SnapKVPress()),
    "adakv, expected_attention": lambda: AdaKVPress(ExpectedAttentionPress()),
    "adakv, expected_attention (epsilon 0.01)": lambda: AdaKVPress(ExpectedAttentionPress(epsilon=1e-2)),
    "criticalkv, snapkv": lambda: CriticalKVPress(SnapKVPress()),
    "criticalkv, expected_attention": lambda: CriticalKVPress(ExpectedAttentionPress(use_vnorm=False)),
    "criticalkv, adakv, snapkv": lambda: CriticalAdaKVPress(SnapKVPress()),
    "kvzip": lambda: KVzipScoredOnce(),
    "duo_attention": lambda: DuoAttentionPress(),
}
"""What makes each press with kvpress's defaults, apart from what its name says; one serves one context at several ratios."""
