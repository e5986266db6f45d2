"""Tokens that are alike within a chunk of the text are merged into one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from semkv.errors import ConfigError
from semkv.ir.program import Program
from semkv.methods.base import Method
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
    bits: of the merged keys and values, 4 or 8.
    """

    delimiters: tuple[int, ...] | None = None
    chunk: int = 32
    window: int = 64
    sinks: int = 4
    bits: int = 8

    name: ClassVar[str] = "semanticache"
    minimum_tokens: ClassVar[int] = 40

    def __post_init__(self) -> None:
        if isinstance(self.delimiters, list):  # as JSON has it
            object.__setattr__(self, "delimiters", tuple(self.delimiters))
        ids = self.delimiters is None or (
            isinstance(self.delimiters, tuple) and all(type(x) is int and x >= 0 for x in self.delimiters)
        )
        for name, sound, expected in (
            ("delimiters", ids, "token ids such as [5, 17]; `semkv.methods.delimiter_ids(tokenizer)` gives them"),
            ("chunk", self.chunk >= 1, "at least 1 token"),
            ("window", self.window >= 1, "at least 1 token"),
            ("bits", self.bits in (4, 8), "4 or 8"),
        ):
            if not sound:
                raise ConfigError(
                    f"option {name!r} of method 'semanticache' is {getattr(self, name)!r}; expected {expected}"
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
