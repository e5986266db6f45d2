"""What a method is composed of, as the runtime sees it. Each component answers one question; see docs/methods.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from torch import Tensor

from semkv.ir.site import AttentionSite
from semkv.runtime.segments import Segmentation

if TYPE_CHECKING:
    from semkv.runtime.record import RowRecord
    from semkv.runtime.spans import FoldedSpans


class Segmenter(Protocol):
    """Which tokens belong together, and which are kept out as anchors."""

    def divide(self, surprisal: Tensor, room: float, span_cost: float, page_size: int) -> Segmentation:
        """Divide a prompt: surprisal [n] nats, `room` tokens for all fixed parts per KV head, `span_cost` tokens a span."""

    def divide_more(self, surprisal: Tensor) -> Tensor:
        """Divide tokens that leave the window during generation: surprisal [t] -> span lengths int64 [m], summing to t."""


class Keeper(Protocol):
    """Which single tokens stay exact for good, per KV head."""

    def keep(self, site: AttentionSite, record: RowRecord, room: int, page_size: int) -> tuple[Tensor, int]:
        """Choose at most `room` exact tokens: (int64 [Hkv|1, a] ascending, first token of the recent window)."""


class Router(Protocol):
    """How relevant each folded span is to a query: what the selector sorts by."""

    def score(self, site: AttentionSite, q: Tensor, spans: FoldedSpans) -> Tensor:
        """q [Hq, T, D] -> logits [Hq, T, M]; a span is unfolded by default where its logit exceeds the threshold."""

    def threshold(self, site: AttentionSite) -> Tensor:
        """Logits [Hq] above which a span is unfolded."""


class FormChooser(Protocol):
    """In which form folded spans wait."""

    def factorize_spans(
        self, site: AttentionSite, k: Tensor, v: Tensor, starts: Tensor, lengths: Tensor, mean_k: Tensor
    ) -> dict[int, list[dict[str, Tensor]]]:
        """Factors of those spans for which they are the smaller faithful form, per KV head.

        k [Hkv, n, D], v [Hkv, n, Dv] hold the spans' tokens in order, mean_k [Hkv, m, D] their summaries. Each entry maps
        the six kinds of `semkv.runtime.host_pool.HostFactors.KINDS` to tensors; spans left out wait as tokens.
        """


@dataclass(frozen=True)
class Summary:
    """What stands for a folded span in the softmax: its weighted mean key and value with log size.

    weights: `surprisal` (SeKV Eq. 2) or `uniform`. bits: of keys and values on the device. attend: False keeps the means
    for routing only. routing: `derived` (routing vectors follow from the mean key) or `uniform` (own mean-pooled vectors).
    """

    weights: Literal["surprisal", "uniform"] = "surprisal"
    bits: int = 4
    attend: bool = True
    routing: Literal["derived", "uniform"] = "derived"


@dataclass(frozen=True)
class Components:
    """A method for the runtime.

    Attributes
    ----------
    keeper: for methods that choose single tokens; None where the segmenter's `kept` tokens are all.
    segmenter, summary, router: for methods that fold spans; None where tokens are only kept or dropped.
    forms: in which form spans wait, see `host_form` for those that it leaves as tokens.
    host_form: `raw` or `int8`.
    outside: where tokens go that are neither exact nor folded: `folded` on or `dropped`.
    fixed_share: part of the budget that fixed parts (exact tokens, window, summaries, indexes) may take; the rest is for
        unfolded spans.
    floor_tokens: fixed parts may always take this many tokens per KV head.
    fill: unfold spans in order of score up to the cap (SeKV Sec. 4.1); False: only those above the threshold (Sec. 3.3).
    unfold: False keeps spans folded (coarse only).
    window: tokens that stay exact behind the newest, before the budget shrinks it to `window_share` of the fixed parts.
    fold_chunk: tokens that leave the window at once.
    """

    keeper: Keeper | None = None
    segmenter: Segmenter | None = None
    summary: Summary | None = None
    router: Router | None = None
    forms: FormChooser | None = None
    host_form: Literal["raw", "int8"] = "int8"
    outside: Literal["folded", "dropped"] = "dropped"
    fixed_share: float = 1.0
    floor_tokens: int = 0
    fill: bool = True
    unfold: bool = True
    window: int = 0
    window_share: float = 1 / 3
    fold_chunk: int = 8
