"""What a running `generate` call and the state that it moves on know of each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from semkv.runtime.content import Content
    from semkv.runtime.state import State


@dataclass
class Turn:
    """One call of `generate`.

    rows, contents: of a prompt or turn whose tokens are more than ids, those of each row, int64 [n], and what they are besides; else None.
    unread: what each row reads first, int64 [n] each, where that is not the call's ids themselves. seen: columns of the call's ids that
    were read. finished: bool [B], the rows that ended; None where they cannot, or before the first token. keeps_prompt: `prompt` is to be
    kept: the state after the prompts that differ, and the place of each row among them.
    """

    rows: list[Tensor] | None = None
    contents: list[Content] | None = None
    unread: list[Tensor] | None = None
    seen: int = 0
    finished: Tensor | None = None
    keeps_prompt: bool = False
    prompt: tuple[State, list[int]] | None = None


__all__ = ["Turn"]
