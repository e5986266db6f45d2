"""What stands at the tokens of a row besides their ids: embeddings, rotary positions of several axes, features that enter layers.

Two kinds of positions are kept apart. The *place* of a token is its number in its row: masks, windows and the memory go by it, and it
counts up by one from token to token. Its *rotary positions* turn queries and keys. In most models they are the place. Where they have
several axes, the tokens of an image share a place in time and differ in height and width, so that an image takes fewer rotary positions
than tokens. A row remembers by how much they differ behind all that it has read (`turned`), and text goes on from there in all axes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

UNKNOWN = -1
"""In the place of the id of a token that came as an embedding alone."""


@dataclass(frozen=True)
class Content:
    """What some tokens of one row are.

    embeds: [n, H], in the place of what the program makes of ids; None: nothing is. rotary: int64 [axes, n]; None: they go on from the
    row's. entering: by site, what is added to the hidden states that enter its layer, [n, H]. blocks: runs of tokens (first, behind the
    last) that attend to one another both ways, as those of an image may; a call reads one such run and nothing else, or none.
    """

    embeds: Tensor | None
    rotary: Tensor | None = None
    entering: Mapping[int, Tensor] = field(default_factory=dict)
    blocks: Sequence[tuple[int, int]] = ()

    def part(self, start: int, end: int | None = None) -> Content:
        """Of tokens start..end."""
        return Content(
            None if self.embeds is None else self.embeds[start:end],
            None if self.rotary is None else self.rotary[:, start:end],
            {site: x[start:end] for site, x in self.entering.items()},
            [(a - start, b - start) for a, b in self.blocks if start <= a and (end is None or b <= end)],
        )

    def edges(self) -> set[int]:
        """Where calls have to end, so that each run is one."""
        return {edge for run in self.blocks for edge in run}


class Contents(ABC):
    """`semkv.ir.memory.Inputs` of rows whose tokens may be more than ids: what a memory that is read with inherits."""

    content: Content | None = None
    """Of the tokens of this call, in a call of one row."""

    @abstractmethod
    def turned_rows(self) -> Sequence[int]:
        """By how much the rotary positions of each row lie above its places."""

    def turned_behind(self, places: Sequence[int], tokens: int) -> list[int]:
        """`turned_rows` behind the `tokens` tokens of a call, which has ended, where `places` are those of the next ones: text goes on
        behind the largest rotary position so far."""
        content, self.content = self.content, None
        before = list(self.turned_rows())
        if content is None or content.rotary is None:
            return before
        last = int(content.rotary.max())
        return [max(place - tokens + turned, last + 1) - place for place, turned in zip(places, before)]

    def embedded(self, x: Tensor) -> Tensor:
        """See `semkv.ir.memory.Inputs.embedded`."""
        embeds = None if self.content is None else self.content.embeds
        return x if embeds is None else embeds[None].to(x)

    def entering(self, site: int, x: Tensor) -> Tensor:
        """See `semkv.ir.memory.Inputs.entering`."""
        if self.content is None or site not in self.content.entering:
            return x
        return x + self.content.entering[site].to(x)

    def rotary(self, positions: Tensor, axes: int) -> Tensor:
        """See `semkv.ir.memory.Inputs.rotary`."""
        if self.content is not None and self.content.rotary is not None:
            return self.content.rotary[:, None].to(positions)
        turned = torch.tensor(self.turned_rows(), dtype=torch.int64, device=positions.device)
        return (positions + turned[:, None]).expand(axes, *positions.shape)


__all__ = ["UNKNOWN", "Content", "Contents"]
