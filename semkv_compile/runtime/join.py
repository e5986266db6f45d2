"""Join the entries of a site's parts, each with KV heads of its own, into one call of the operator."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from semkv.ir.memory import Entries
from semkv.ir.site import AttentionSite

NEG_INF = float("-inf")
GROUPS = (
    ("exact_bias", ("exact_k", "exact_v", "exact_positions")),
    ("coarse_bias", ("coarse_k", "coarse_v", "coarse_positions")),
    ("factored_bias", ("key_u", "key_s", "key_v", "value_u", "value_s", "value_v", "factored_positions")),
)


def join_parts(parts: list[Entries], kv_heads: list[int], site: AttentionSite, tokens: int) -> Entries:
    """Entries without a batch dimension of `kv_heads` heads each -> those of all heads of `site`, for `tokens` queries.

    A part with fewer entries than another is padded; padding has bias -inf.
    """
    if len(parts) == 1:
        return parts[0]
    out: dict[str, Tensor | None] = {}
    for bias, names in GROUPS:
        present = [part for part in parts if getattr(part, names[0]) is not None]
        if not present:
            continue
        filled = [part if getattr(part, names[0]) is not None else _absent(present[0], bias, names) for part in parts]
        for name in names:
            out[name] = _joined([_rows(getattr(part, name), heads) for part, heads in zip(filled, kv_heads)])
        shape = out[names[-1]].shape[1:]  # positions: [heads, entries] or [heads, spans, tokens]
        biases = []
        for part, heads in zip(filled, kv_heads):
            own, rows = getattr(part, bias), heads * site.group_size
            here = getattr(part, names[-1]).shape[1:]
            if own is None:
                own = torch.zeros(1, 1, *here, device=getattr(part, names[0]).device)
            own = own.expand(rows, tokens, *here)
            widths = [width for have, want in zip(reversed(here), reversed(shape)) for width in (0, want - have)]
            biases.append(pad(own, widths, value=NEG_INF))
        out[bias] = torch.cat(biases)
    if all(part.exact_bias is None for part in parts) and len({part.exact_k.shape[1] for part in parts}) == 1:
        out["exact_bias"] = None
    return Entries(**out)


def _absent(like: Entries, bias: str, names: tuple[str, ...]) -> Entries:
    """`like` with no entry of one kind."""
    empty = {name: getattr(like, name)[:, :0] for name in names}
    return like._replace(**empty, **{bias: None})


def _rows(x: Tensor, heads: int) -> Tensor:
    """x [heads|1, ...] or of another part's heads where it is empty -> [heads, ...]."""
    return x[:1].expand(heads, *x.shape[1:]) if x.shape[0] != heads else x


def _joined(parts: list[Tensor]) -> Tensor:
    """Pad every dimension but the first to its largest, and join along the first."""
    sizes = [max(part.shape[dim] for part in parts) for dim in range(1, parts[0].dim())]
    padded = []
    for part in parts:
        widths = [width for have, want in zip(reversed(part.shape[1:]), reversed(sizes)) for width in (0, want - have)]
        padded.append(pad(part, widths))
    return torch.cat(padded)
