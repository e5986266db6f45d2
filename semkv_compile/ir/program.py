"""A captured model at some stage of its rewriting."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch.fx import GraphModule

from semkv.ir.ranks import Ranks
from semkv.ir.recurrence import RecurrentSite
from semkv.ir.rewritten import Rewritten
from semkv.ir.seams import Seams
from semkv.ir.site import AttentionSite

Stage = Literal["captured", "found", "annotated", "lowered"]


KEY_MEAN, KEY_SCALE = "key_mean_{}", "key_scale_{}"
"""Constants [Hkv, 1, D] of a program whose keys of a store are balanced: (k - mean) * scale."""


@dataclass(frozen=True)
class Program:
    """The stateless forward of a decoder, split where logits begin, and what is known about it.

    Attributes
    ----------
    stage: which of the specs in `semkv.ir.spec` its graphs obey.
    body: placeholders `input_ids` [B, T] int64 and `positions` [B, T] int64; returns the last hidden states [B, T, H].
        Until the `surprisal head` pass has run, it returns logits [B, T, vocab]. Parameters are `get_attr` nodes under
        the names they have in the user's model and share its storage.
    head: hidden states [..., H] -> logits [..., vocab]; None until split off.
    prefill, extend, decode: the lowered bodies, with a third placeholder `memory` (`semkv.ir.memory.Memory`); None
        before stage `lowered`. They share every parameter with `body`.
    selector: of a method that chooses tokens before the first layer: `input_ids`, `positions` and maybe `features` [B, T, F]
        -> (queries [B, Hq, T, D], keys [B, Hkv, T, D]); None for all others.
    sites: the attention sites in execution order.
    recurrences: modules that are one node each, in execution order: they go on from states which are no keys and values, treat each
        token by itself in code that branches on values, or choose which tokens attention reads.
    vocab_size: ids must lie in [0, vocab_size).
    max_positions: the model's declared context in tokens, None where it declares none.
    dtype: of the parameters that attention computes in.
    batched: whether one call may hold rows with different positions; where not, rows run one at a time.
    evaluated: names of the tensors whose numbers passes read to write others into the program (biases, scales, windows): a model in
        which they changed has another program.
    seams: where what a prompt brings besides its ids enters.
    ranks: the processes that share the model, of whose heads this is a program; None: of all heads.
    notes: per pass, what it did, in order; shown by `semkv.explain(verbose=True)` and kept in artifacts.
    rewritten: the lowered graphs of a body that a method leaves as it is, for the next such method.
    """

    stage: Stage
    body: GraphModule
    head: GraphModule | None
    sites: tuple[AttentionSite, ...]
    vocab_size: int
    max_positions: int | None
    dtype: torch.dtype
    batched: bool = True
    prefill: GraphModule | None = None
    extend: GraphModule | None = None
    decode: GraphModule | None = None
    selector: GraphModule | None = None
    recurrences: tuple[RecurrentSite, ...] = ()
    evaluated: tuple[str, ...] = ()
    seams: Seams = field(default_factory=Seams)
    ranks: Ranks | None = None
    notes: tuple[str, ...] = field(default=())
    rewritten: Rewritten = field(default_factory=Rewritten, repr=False, compare=False)

    def evolve(self, note: str | None = None, **changes) -> Program:
        """A copy with `changes`, and `note` appended to the notes."""
        notes = self.notes if note is None else (*self.notes, note)
        return replace(self, notes=notes, **changes)

    @property
    def stateful(self) -> tuple[RecurrentSite, ...]:
        """Of `recurrences` those whose states are of one size; the others treat each token by itself, or choose tokens."""
        return tuple(site for site in self.recurrences if site.states and not site.chooses)

    @property
    def choosers(self) -> tuple[RecurrentSite, ...]:
        """Of `recurrences` those that choose which tokens attention reads."""
        return tuple(site for site in self.recurrences if site.chooses)

    @property
    def restricted(self) -> bool:
        """Whether some attention reads other tokens than those of its past or its window: its chunk, or what a module chooses."""
        return any(site.chunk or site.chooser >= 0 for site in self.sites)

    @property
    def stores(self) -> tuple[AttentionSite, ...]:
        """For each KV store, the first site that reads it (the one whose keys and values are stored)."""
        first: dict[int, AttentionSite] = {}
        for site in self.sites:
            first.setdefault(site.store, site)
        return tuple(first[index] for index in sorted(first))
