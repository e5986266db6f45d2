"""Where what a prompt brings besides its ids enters a program."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Seams:
    """Places in a program's body, by the names of their nodes, which the graphs made of it keep.

    Attributes
    ----------
    embeddings: the tensor [B, T, H] through which all passes that the program knows of its ids: what the model's
        `get_input_embeddings()` returns. "" where there is none, and `reason` says why.
    rotary: where positions become rotary positions of several `axes`, int64 [axes, B, T]; "" where they have one, which is the order.
    streams: of a model that takes more than text, (site, name of the hidden states [B, T, H] that enter its layer): features of images may
        be added to them. Empty for all others.
    reads_more: whether the model takes more than text.
    """

    embeddings: str = ""
    rotary: str = ""
    axes: int = 1
    streams: tuple[tuple[int, str], ...] = ()
    reads_more: bool = False
    reason: str = ""


EMBEDDINGS = "semkv_embeddings"
"""The mark that a capture leaves in the metadata of the node that is what the model makes of ids."""

__all__ = ["EMBEDDINGS", "Seams"]
