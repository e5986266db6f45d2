"""What a method is composed of, as the runtime sees it. Each component answers one question; see docs/methods.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from semkv.ir.site import AttentionSite
from semkv.runtime.decode.units import Units
from semkv.runtime.prompt.record import RowRecord
from semkv.runtime.step import Step
from semkv.runtime.store.quantization import Quantized, bytes_per_vector
from semkv.runtime.store.segments import Boundary, Folding, Segmentation
from semkv.runtime.views import UnitsView


class Segmenter(Protocol):
    """Which tokens belong together, and which are kept out as anchors."""

    @property
    def per_store(self) -> bool:
        """Whether the division depends on a layer's keys; where not, layers with the same room share one."""

    @property
    def reads_surprisal(self) -> bool:
        """Whether it needs the surprisal of every token."""

    def segment(
        self, record: RowRecord, store: AttentionSite, room: float, unit_cost: float, page_size: int
    ) -> Segmentation:
        """Divide a prompt: `room` tokens for all fixed parts per KV head, `unit_cost` tokens for what a unit keeps there. The record's keys
        and queries are where the prompt was read; the division is on the host."""

    def segment_more(self, ids: Tensor, surprisal: Tensor, k: Tensor) -> Segmentation:
        """Divide tokens that leave the window during generation: ids [t], surprisal [t] nats, k [Hkv, t, D]."""


@runtime_checkable
class Continuing(Protocol):
    """What a segmenter has whose units may go on in tokens that leave the window later, as sentences do in generation.

    longest: tokens of a unit that goes on. Where units stand behind a token is one number, 0 before the first.
    """

    @property
    def longest(self) -> int: ...

    def state_behind(self, ids: Tensor) -> int:
        """Where units stand behind the first tokens ids [n] of a sequence."""

    def segment_on(self, state: int, ids: Tensor) -> tuple[Segmentation, bool, int]:
        """Divide ids [t] behind which tokens left units at `state`: how, whether the first unit goes on with the last one, and where
        units stand then."""


@runtime_checkable
class Cutting(Protocol):
    """What a segmenter has that divides tokens which leave the window as it divided the prompt: by their surprisal.

    max_span: tokens of a unit that goes on.
    """

    @property
    def max_span(self) -> int: ...

    def natural(self, surprisal: Tensor) -> Boundary:
        """The boundary of a text that was not divided yet, surprisal float32 [n] in nats."""

    def places(self, room: float, kept: int, summaries: float, page_size: int) -> int:
        """How many more tokens may stay exact: all fixed parts have `room` tokens per KV head, of which `kept` exact ones behind the
        window and the `summaries` of units take their part."""

    def cut(self, surprisal: Tensor, boundary: Boundary, open_tokens: int, places: int) -> tuple[Segmentation, bool]:
        """Divide tokens of surprisal float32 [t] by `boundary`, the last unit before which has `open_tokens` tokens, 0 where they do not
        follow on one; at most `places` stay exact. How, of the tokens before its `recent`, at least one, and whether the first segment
        goes on with that unit."""


class Keeper(Protocol):
    """Which single tokens stay exact for good, per KV head."""

    def keep(self, site: AttentionSite, record: RowRecord, room: int, page_size: int) -> tuple[Tensor, int]:
        """Choose at most `room` exact tokens: (int64 [Hkv|1, a] ascending, on the host, first token of the recent window). The record's
        keys and queries are where the prompt was read."""


class Evictor(Protocol):
    """A keeper that goes on choosing in generation.

    Each exact token has a score per KV head, in float32 beside its key and value, which every step adds to. Whenever tokens
    leave the full recent window, they contend with the kept ones for their places, and the lowest-scored go.
    """

    def places(self, room: int, page_size: int) -> int:
        """Of `room` exact tokens per KV head, those that kept ones may take, in whole pages; the window has at least one."""

    def scores(self, site: AttentionSite, record: RowRecord) -> Tensor:
        """Scores of all tokens of a prompt, finite and not negative, [Hkv, n] on the host."""

    def added(self, site: AttentionSite, q: Tensor, k: Tensor, hidden: Tensor) -> Tensor:
        """What new queries q [Hq, T, D] add to the scores of the exact tokens k [Hkv, N, D] -> [Hkv, N]; hidden bool
        [Hkv|1, 1, T, N]: later than the query."""


class ExactKeys(NamedTuple):
    """Keys of exact tokens in a step's graph: k [B, Hkv, n, D], codes of 8 or 4 bits where there is a scale [B, Hkv, n, 1]; positions int32
    [B, Hkv|1, n], later than every query where there is no token."""

    k: Tensor
    scale: Tensor | None
    positions: Tensor


@runtime_checkable
class Giver(Protocol):
    """What an evictor has that adds to scores within a step's graph."""

    def given(self, site: AttentionSite, q: Tensor, held: Sequence[ExactKeys], asked: Tensor) -> list[Tensor]:
        """What the queries q float32 [B, Hkv, G, D] of one token a row, at position `asked` int64 [B, 1], add to the scores of the exact
        tokens, [B, Hkv, n] each."""


class Allocator(Protocol):
    """How the budget of a row is divided among its layers once the prompt was read."""

    def shares(self, stores: tuple[AttentionSite, ...], record: RowRecord, budget: float) -> tuple[float, ...]:
        """One share per store of `stores`, not negative, summing to 1; `budget` is tokens per KV head and layer on average.

        A layer's share is raised to the method's smallest size, and held to all tokens, where that changes it.
        """


@dataclass(frozen=True)
class IndexPart:
    """One tensor of an index: `rows` x units x `dim` on the device.

    bits: quantised per vector (4 or 8, see `semkv.runtime.store.quantization`); None: plain numbers of `dtype`. merge: what becomes
    of it when units merge: the mean by size, the smaller, the larger; `rebuild`: the router computes it from the units'
    means (`Router.rebuild`); `never`: such units do not merge.
    """

    rows: int
    dim: int
    bits: int | None = None
    dtype: torch.dtype = torch.float16
    merge: Literal["mean", "min", "max", "rebuild", "never"] = "mean"

    @property
    def unit_nbytes(self) -> int:
        """Device bytes of one unit, over all rows."""
        each = self.dim * self.dtype.itemsize if self.bits is None else bytes_per_vector(self.dim, self.bits)
        return self.rows * each


class Router(Protocol):
    """How relevant each folded unit is to a query: what the selector sorts by, and the index that it reads for it."""

    def index(self, site: AttentionSite, summary: Summary | None) -> Mapping[str, IndexPart]:
        """The tensors that the device keeps per unit beside the method's summary, by name. Empty: the means suffice."""

    def build(self, site: AttentionSite, folding: Folding, mean_k: Tensor | None) -> Mapping[str, Tensor]:
        """The tensors of `index` for newly folded units, [rows, units, dim], given their summaries [Hkv, units, D]: where the tensors of
        `folding` are."""

    def rebuild(self, site: AttentionSite, name: str, mean_k: Tensor) -> Tensor:
        """One tensor of `index` with the merge rule `rebuild`, from the means [Hkv, units, D] of merged units."""

    def score(self, site: AttentionSite, q: Tensor, spans: UnitsView, step: Step) -> Tensor:
        """q [Hq, T, D] -> logits [Hq, T, M]; a unit is unfolded by default where its logit exceeds the threshold, and
        never where it is -inf."""

    def threshold(self, site: AttentionSite) -> Tensor:
        """Logits [Hq] above which a unit is unfolded."""


@runtime_checkable
class Scorer(Protocol):
    """What a router has that scores within a step's graph."""

    def constants(self, site: AttentionSite) -> Mapping[str, Tensor]:
        """Tensors that `scores` reads of the site by `Units.constant`."""

    def scores(self, site: AttentionSite, q: Tensor, units: Units) -> Tensor:
        """q float32 [B, Hkv, R, D] -> [B, Hkv, R, M]: `Router.score` for one token of each row, in plain PyTorch without a question to the
        host, and without a size of what grows. Numbers beyond `Units.count` are never read."""


@runtime_checkable
class Rest(Protocol):
    """What a `Scorer` has that knows enough of the units that stay folded to attend to them, where the method has no summaries."""

    def has_rest(self, site: AttentionSite) -> bool:
        """Whether it does at this site."""

    def rest(
        self, site: AttentionSite, score: Tensor, chosen: Tensor, own: Tensor | None, units: Units
    ) -> tuple[Tensor, Tensor]:
        """`Coarse.attend` within a step's graph: of score float32 [B, Hkv, R, M] and the units chosen bool [B, Hkv, M], or own bool
        [B, Hkv, R, M] where rows differ, -> float32 [B, Hkv, R, Dv] and [B, Hkv, R]."""


@dataclass(frozen=True)
class Brought:
    """tensors: by the names under which `Units.tensors` has them, [...] without a dimension of rows. skipped: numbers before the first
    unit, where scores begin with something else than units. written: names of tensors that `scores` writes to."""

    tensors: Mapping[str, Tensor]
    skipped: int = 0
    written: tuple[str, ...] = ()


@runtime_checkable
class Bringer(Protocol):
    """What a `Scorer` has that reads more of a row than its units."""

    def bring(self, site: AttentionSite, step: Step, spans: UnitsView) -> Brought:
        """For the turn of `site` in a step over one token, before any layer runs (`step.q` has no numbers). A tensor that `scores` writes
        to must be the row's own: `step.notes` are shared with copies of the row."""


@runtime_checkable
class Taker(Protocol):
    """What a `Scorer` has that reads what earlier layers passed on (`Passer`)."""

    def taken(self, site: AttentionSite) -> tuple[str, ...]:
        """By which names."""


@runtime_checkable
class OfTokens(Protocol):
    """What a `Scorer` has that scores within a graph where units are single tokens only. of_tokens: whether that is so."""

    @property
    def of_tokens(self) -> bool: ...


@runtime_checkable
class Passer(Protocol):
    """What an `AtSite` has that leaves tensors for later layers within a step's graph."""

    def names(self, site: AttentionSite) -> tuple[str, ...]:
        """Of what it passes on."""

    def passed(
        self, site: AttentionSite, q: Tensor, held: Sequence[ExactKeys], asked: Tensor, places: Tensor
    ) -> dict[str, Tensor]:
        """Of q float32 [B, Hkv, G, D] of one token a row at position `asked` int64 [B, 1], and the keys of all tokens, wherever they are;
        by the names under which `Units.tensors` of this layer and of later ones have them. places float32 [B, at least asked + 2], without
        numbers: for what is told of each position."""


@runtime_checkable
class Derived(Protocol):
    """What a router has that reads more than the index, made again whenever units change."""

    def derived(self, spans: UnitsView) -> Mapping[str, Quantized | Tensor]:
        """Tensors [H, M, ...] by the names under which `Units.tensors` has them."""


@runtime_checkable
class Coarse(Protocol):
    """What a router has that knows enough of the units that stay folded to attend to them, where the method has no summaries."""

    def attend(
        self, site: AttentionSite, q: Tensor, score: Tensor, seen: Tensor, spans: UnitsView
    ) -> tuple[Tensor, Tensor] | None:
        """For queries q [Hq, T, D] whose units have `score` [Hq, T, M] by this router, and read those of `seen` bool [Hq, T|1, M] unfolded:
        what attention to all others gives, [Hq, T, Dv], and the logarithm of its mass [Hq, T] (the sum of the exponentials of their
        logits, -inf where there are none). None where the site's attention is of a kind that it does not know."""


class FormChooser(Protocol):
    """In which form folded spans wait."""

    def factorize_spans(
        self, site: AttentionSite, k: Tensor, v: Tensor, starts: Tensor, lengths: Tensor, mean_k: Tensor
    ) -> dict[int, list[dict[str, Tensor]]]:
        """Factors of those spans for which they are the smaller faithful form, per KV head.

        k [Hkv, n, D], v [Hkv, n, Dv] hold the spans' tokens in order, mean_k [Hkv, m, D] their summaries. Each entry maps
        the six kinds of `semkv.runtime.host.pool.HostFactors.KINDS` to tensors; spans left out wait as tokens.
        """


@dataclass(frozen=True)
class Summary:
    """What stands for a folded unit in the softmax: its weighted mean key and value with log size.

    weights: `surprisal` (SeKV Eq. 2) or `uniform`. bits: of keys and values on the device, 4 or 8; 16: in the KV dtype. attend: False keeps
    the means for routing only. routing: `derived` (routing vectors follow from the mean key) or `uniform` (own mean-pooled vectors).
    """

    weights: Literal["surprisal", "uniform"] = "surprisal"
    bits: int = 4
    attend: bool = True
    routing: Literal["derived", "uniform"] = "derived"


Form = Literal["raw", "int8", "int4"]
"""Of tokens on the device: in the KV dtype, or codes with a scale per token and KV head."""


@dataclass(frozen=True)
class Components:
    """A method for the runtime.

    Attributes
    ----------
    keeper: for methods that choose single tokens once; None where the segmenter's `kept` tokens are all.
    evictor: for methods that choose single tokens and go on choosing; in place of a keeper.
    segmenter, router: for methods that fold; None where tokens are only kept or dropped.
    summary: what stands for a folded unit in the softmax; None: nothing.
    forms: in which form spans wait, see `host_form` for those that it leaves as tokens.
    exact_form: of exact and unfolded tokens on the device, `raw` in the KV dtype, or `int8` or `int4`, codes with a scale per token and
        KV head, which need the same `host_form`: a token's codes are made once, and move as they are.
    kept_form: of exact tokens that stay for good; None: `exact_form`. The first tokens of a text, which all queries attend to, are worth
        8 bits beside 4.
    host_form: `raw`, `int8`, `int4`, or `none`: folded tokens are not kept, their summary is all that is left of them.
    outside: where tokens go that are neither exact nor folded: `folded` on or `dropped`.
    fixed_share: part of the budget that fixed parts (exact tokens, window, summaries, indexes) may take; the rest is for
        unfolded units.
    floor_tokens: fixed parts may always take this many tokens per KV head.
    fill: unfold in order of score up to the cap (SeKV Sec. 4.1); False: only those above the threshold (Sec. 3.3).
    unit: tokens of a folded unit where the index of so many fits; else they are larger.
    most: tokens per KV head that are unfolded at most, whatever room there is; 0: no such limit.
    unfold: False keeps everything folded (coarse only).
    window: tokens that stay exact behind the newest, before the budget shrinks it to `window_share` of the fixed parts.
    fold_chunk: tokens that leave the window at once.
    reads_queries: whether the record of a prompt must hold all of its queries, not the last ones only.
    reads_others: whether a store's memory is made of other stores' keys too, so that a record keeps them until all are made.
    whole: every token stays exact on the device, whatever it takes; the row's other parts share what is left of its budget.
    """

    keeper: Keeper | None = None
    evictor: Evictor | None = None
    segmenter: Segmenter | None = None
    summary: Summary | None = None
    router: Router | None = None
    forms: FormChooser | None = None
    exact_form: Form = "raw"
    kept_form: Form | None = None
    host_form: Literal["raw", "int8", "int4", "none"] = "int8"
    outside: Literal["folded", "dropped"] = "dropped"
    fixed_share: float = 1.0
    floor_tokens: int = 0
    fill: bool = True
    unit: int = 8
    most: int = 0
    unfold: bool = True
    window: int = 0
    window_share: float = 1 / 3
    fold_chunk: int = 8
    reads_queries: bool = False
    reads_others: bool = False
    whole: bool = False

    def __post_init__(self) -> None:
        moved = self.exact_form != "raw" and self.host_form not in (self.exact_form, "none")
        if moved or (self.host_form == "int4" and self.exact_form != "int4"):
            raise ValueError(
                f"exact_form is {self.exact_form!r} and host_form {self.host_form!r}; expected the same codes on the host, which move as "
                "they are, and of 4 bits in both places"
            )

    @property
    def reads_surprisal(self) -> bool:
        """Whether prefill has to compute the surprisal of every token."""
        return self.segmenter is not None and self.segmenter.reads_surprisal

    # What every layer of every step asks is told once.

    @cached_property
    def bringer(self) -> Bringer | None:
        """The router, where it is one."""
        return self.router if isinstance(self.router, Bringer) else None

    @cached_property
    def rest(self) -> Rest | None:
        """The router, where it is one."""
        return self.router if isinstance(self.router, Rest) else None

    @cached_property
    def derived(self) -> Derived | None:
        """The router, where it is one."""
        return self.router if isinstance(self.router, Derived) else None

    @cached_property
    def cutting(self) -> Cutting | None:
        """The segmenter, where it is one."""
        return self.segmenter if isinstance(self.segmenter, Cutting) else None

    @cached_property
    def continuing(self) -> Continuing | None:
        """The segmenter, where it is one."""
        return self.segmenter if isinstance(self.segmenter, Continuing) else None

    @cached_property
    def of_tokens(self) -> bool:
        """Whether the router goes by single tokens."""
        return isinstance(self.router, OfTokens) and self.router.of_tokens


@dataclass(frozen=True)
class Part:
    """A run of KV heads of one store with their own composition.

    first, last: KV heads [first, last) in the order of the lowered program. share: of the store's budget, in (0, 1]. of: where processes
    share the heads, the first head and the number of heads of the part that one process would have, of which these are some.
    """

    first: int
    last: int
    components: Components
    share: float = 1.0
    of: tuple[int, int] = (0, 0)

    def site(self, site: AttentionSite, share: float = 1.0) -> AttentionSite:
        """What `site` has in these heads, with `share` of its budget."""
        return site.part(self.first, self.last, share, self.of[1])


def own_parts(parts: Sequence[Part], order: Sequence[int], site: AttentionSite) -> tuple[Part, ...]:
    """What a process's `site` has of the `parts` of all heads of a store, which stand in `order`, the user's model's KV heads; in the
    order of its own heads."""
    place = {head: at for at, head in enumerate(order)}
    whole = [next(part for part in parts if part.first <= place[head] < part.last) for head in site.head_order]
    made, first = [], 0
    for _, run in groupby(whole, key=lambda part: part.first):
        part, *others = run
        last, heads = first + 1 + len(others), part.last - part.first
        share = part.share * (last - first) / heads
        made.append(Part(first, last, part.components, share, (part.first, heads)))
        first = last
    return tuple(made)


@dataclass(frozen=True)
class Note:
    """What a row remembers under one name: a tensor of `dtype` with the sizes of `shape`, None where any will do.

    charged: its bytes are on the device between steps and count towards the budget.
    """

    shape: tuple[int | None, ...]
    dtype: torch.dtype
    charged: bool = False

    def check(self, x: Tensor, name: str) -> Tensor:
        """`x`, or `ValueError` where it is something else."""
        fits = x.dim() == len(self.shape) and all(want in (None, have) for want, have in zip(self.shape, x.shape))
        if not fits or x.dtype != self.dtype:
            raise ValueError(f"note {name!r} is {x.dtype} {tuple(x.shape)}, expected {self.dtype} {self.shape}")
        return x


@dataclass(frozen=True)
class Charge:
    """What a method's charged notes take at most: `token_nbytes` device bytes for each token of a row, and `share` of its budget. here:
    where processes share the model, how much of the notes of all of them one holds; counted: how much of them its own budget counts."""

    token_nbytes: float = 0.0
    share: float = float("inf")
    here: float = 1.0
    counted: float = 1.0


Cap = Callable[[int], float]
"""Device bytes of a row's whole budget at a number of tokens, in all processes that share it; infinite without a budget."""


class BeforeStep(Protocol):
    """What a method does with the new tokens before any layer runs; it leaves its result in `passing`."""

    def begin(self, ids: Tensor, tokens: int, notes: dict[str, Tensor], passing: dict[str, object], cap: Cap) -> None:
        """ids int64 [T] follow `tokens` tokens of the row. notes: kept by the row between steps; passing: for this step."""


class AfterPrompt(Protocol):
    """What a method remembers of a prompt, for its steps."""

    def read(self, record: RowRecord, notes: dict[str, Tensor], cap: Cap) -> None:
        """Put into `notes`, on the host, what `record` tells. The row's memories do not exist yet: what is charged makes them smaller."""


class AtSite(Protocol):
    """What a method does in one site's turn, for the layers after it."""

    def stored(self, step: Step) -> None:
        """The site's new tokens are in its memories, and it is about to attend; what others need is left in `step.passing`."""


Generated = Literal["budgeted", "kept"]
"""What the tokens that follow a prompt are: `budgeted`, memory like all others, so that the budget caps the row in every step; or `kept`
exact on the device, so that it caps what is left of the prompt alone, as in papers that evict once."""


@dataclass(frozen=True)
class Plan:
    """A method for one program: for each store that it treats, the parts that its KV heads are divided into, in order.

    allocator: divides the budget among layers per prompt; None: the sites' own shares. before: see `BeforeStep`.
    after_prompt: see `AfterPrompt`. at_site: by site index, see `AtSite`.
    notes: what its components keep in `Step.notes`, by name; charge: what those of them that are charged take.
    features: sites whose entering hidden states the row keeps of the last step, as notes `features.SITE` [T, H], and
        records of the whole prompt.
    generated: see `Generated`.
    together: where processes share heads that divide a budget, the parts of all heads of `AttentionSite.whole`, which the budget is
        divided among; empty where each process divides that of its own.
    """

    parts: Mapping[int, tuple[Part, ...]]
    allocator: Allocator | None = None
    before: BeforeStep | None = None
    notes: Mapping[str, Note] = field(default_factory=dict)
    after_prompt: AfterPrompt | None = None
    at_site: Mapping[int, AtSite] = field(default_factory=dict)
    features: tuple[int, ...] = ()
    charge: Charge = Charge()
    generated: Generated = "budgeted"
    together: Mapping[int, tuple[Part, ...]] = field(default_factory=dict)

    def of_all(self, stores: Sequence[AttentionSite]) -> tuple[tuple[AttentionSite, ...], Plan]:
        """The `stores` and the plan that a budget is divided by: of all processes' heads, where they divide it together."""
        if not self.together:
            return tuple(stores), self
        charge = replace(self.charge, token_nbytes=self.charge.token_nbytes / self.charge.counted)
        return tuple(store.whole for store in stores), replace(self, parts=self.together, together={}, charge=charge)

    @cached_property
    def passers(self) -> Mapping[int, Passer]:
        """Those of `at_site` that pass on what they know, by site index."""
        return {site: actor for site, actor in self.at_site.items() if isinstance(actor, Passer)}

    @cached_property
    def charged(self) -> frozenset[str]:
        """The notes that the budget counts."""
        return frozenset(name for name, note in self.notes.items() if note.charged)

    def all_components(self) -> tuple[Components, ...]:
        """The distinct compositions, in order; of all processes' heads, so that they run the same steps."""
        seen: dict[int, Components] = {}
        for parts in (self.together or self.parts).values():
            for part in parts:
                seen.setdefault(id(part.components), part.components)
        return tuple(seen.values())

    @property
    def reads_surprisal(self) -> bool:
        """Whether prefill has to compute the surprisal of every token."""
        return any(components.reads_surprisal for components in self.all_components())

    @property
    def reads_queries(self) -> bool:
        """Whether prefill has to keep every query of the prompt."""
        return any(components.reads_queries for components in self.all_components())

    @property
    def reads_others(self) -> bool:
        """Whether some memories are made of other stores' keys too."""
        return any(components.reads_others for components in self.all_components())

    @property
    def keeps_whole_heads(self) -> bool:
        """Whether some parts hold every token, so that the others share what those leave."""
        return any(components.whole for components in self.all_components())

    @property
    def keeps_generated(self) -> bool:
        """Whether tokens that follow a prompt stay exact beside the budget."""
        return self.generated == "kept"

    @property
    def unfolds(self) -> bool:
        """Whether decode steps bring folded tokens back."""
        return any(part.unfold and part.router is not None for part in self.all_components())

    @property
    def fold_chunk(self) -> int:
        """The fewest tokens that leave a window at once."""
        return min((components.fold_chunk for components in self.all_components()), default=8)
