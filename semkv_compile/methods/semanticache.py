"""Tokens that are alike within a chunk of the text are merged into one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from semkv.ir.program import Program
from semkv.methods.base import Method
from semkv.methods.options import MeanBits, Tokens, TokensOrNone
from semkv.methods.semantic_clusters import SemanticClusters, sentence_delimiters
from semkv.profiles.schema import Profile
from semkv.runtime.components import Components, Summary


@dataclass(frozen=True)
class SemantiCache(Method):
    """SemantiCache (Wu et al., 2026): chunks end at delimiters, greedily seeded clusters of each chunk's keys are merged into
    a mean key and value, and proportional attention gives each the weight of its tokens (log size). Nothing comes back.

    delimiters: ids of the tokens that end a chunk, see `delimiter_ids`; none of them, `()`: chunks have `chunk` tokens. None: the
    tokens that may end a sentence by the profile, see `sentence_delimiters`; none where it has no sentences. chunk: longest
    chunk, tokens. window: recent tokens that stay exact, at most a third of the room. sinks: first tokens that stay exact.
    bits: of the merged keys and values, 4 or 8; 16: in the KV dtype.
    """

    delimiters: tuple[int, ...] | None = None
    chunk: Tokens = 32
    window: Tokens = 64
    sinks: TokensOrNone = 4
    bits: MeanBits = 8

    name: ClassVar[str] = "semanticache"
    minimum_tokens: ClassVar[int] = 40

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.delimiters, list):  # as JSON has it
            object.__setattr__(self, "delimiters", tuple(self.delimiters))
        ids = self.delimiters is None or (
            isinstance(self.delimiters, tuple) and all(type(x) is int and x >= 0 for x in self.delimiters)
        )
        if not ids:
            raise self.wrong(
                "delimiters", "token ids such as [5, 17]; `semkv.methods.delimiter_ids(tokenizer)` gives them"
            )

    def components(self, program: Program, profile: Profile | None) -> Components:
        segmenter = SemanticClusters(self._ends(profile), self.chunk, self.window, sinks=self.sinks)
        return Components(
            segmenter=segmenter,
            summary=Summary(weights="uniform", bits=self.bits),
            host_form="none",
            outside="folded",
            unfold=False,
            window=self.window,
            window_share=segmenter.share,
            fold_chunk=segmenter.fold_chunk,
        )

    def _ends(self, profile: Profile | None) -> tuple[int, ...]:
        """Ids of the tokens that end a chunk."""
        if self.delimiters is not None:
            return self.delimiters
        if profile is None or profile.info.sentences is None:
            return ()
        return sentence_delimiters(profile.tensors["sentences.classes"])
