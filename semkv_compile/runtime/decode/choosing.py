"""Which folded units a step unfolds: those that its scores ask for, as far as the room reaches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from semkv.ir.site import AttentionSite
from semkv.kernels.selection.cpp import MAX_ALLOWANCE, answers, select_cpp
from semkv.runtime.components import Components
from semkv.runtime.decode.largest import largest
from semkv.runtime.views import UnitsView

NEG_INF = float("-inf")


@dataclass(frozen=True)
class Zoom:
    """The units that a step unfolds: chosen bool [Hkv, M]; own bool [Hkv, G, T, M], what each query head and token reads of
    them, None where all read all; taken int64 [Hkv]: how many are chosen, where that was counted."""

    chosen: Tensor
    group_size: int
    tokens: int
    own: Tensor | None = None
    taken: Tensor | None = None

    @property
    def heads(self) -> Tensor:
        """bool [Hq, T, M]: the units that each query head reads."""
        if self.own is not None:
            return self.own.flatten(0, 1)
        return self.chosen.repeat_interleave(self.group_size, 0)[:, None].expand(-1, self.tokens, -1)

    def seen(self, device: torch.device) -> Tensor:
        """`heads` on `device`, or bool [Hq, 1, M] where all tokens read the same."""
        if self.own is not None:
            return self.heads.to(device)
        chosen = self.chosen.to(device)  # before it is repeated, which is little to send
        return chosen[:, None].expand(-1, self.group_size, -1).flatten(0, 1)[:, None]

    def counts(self) -> tuple[Tensor, int]:
        """(units read, summed over tokens, int64 [Hq], decisions that each query head took)."""
        if self.own is not None:
            read = self.own.flatten(0, 1).sum(dim=(1, 2))
        else:
            taken = self.chosen.sum(1) if self.taken is None else self.taken
            read = (taken * self.tokens).repeat_interleave(self.group_size)
        return read, self.tokens * self.chosen.shape[1]


def threshold_of(components: Components, site: AttentionSite) -> Tensor:
    """float32 [Hq]: the score above which each query head wants a unit; -inf where the method fills the cap."""
    return (
        torch.full((site.q_heads,), NEG_INF, dtype=torch.float32, device="cpu")
        if components.fill
        else components.router.threshold(site).float()
    )


def choose_units(
    components: Components, spans: UnitsView, site: AttentionSite, score: Tensor, allowance: float
) -> Zoom:
    """Which units each query head unfolds by score float32 [Hq, T, M] on the host: those above its threshold, or all in order of score
    where the method fills the cap; over the cap of `allowance` device bytes, per KV head, the highest-scored of the group's union."""
    group, tokens = site.group_size, score.shape[1]
    threshold = threshold_of(components, site)
    room, (least, greatest) = allowance / site.kv_heads, spans.unit_nbytes_range
    most = score.shape[2] if room == float("inf") else min(score.shape[2], int(room // max(1, least)))
    if answers(score):
        equal = least == greatest
        cost = None if equal else spans.unit_nbytes()
        found = select_cpp(score, threshold, cost, most if equal else int(min(room, MAX_ALLOWANCE)), site.kv_heads)
        wanted = ((score > NEG_INF) & (score > threshold[:, None, None])) if found.differ else None
        own = None if wanted is None else wanted.unflatten(0, (site.kv_heads, group)) & found.chosen[:, None, None]
        return Zoom(found.chosen, group, tokens, own, found.taken)
    grouped = score.unflatten(0, (site.kv_heads, group))
    grouped = grouped.masked_fill(grouped <= threshold.view(site.kv_heads, group, 1, 1), NEG_INF)
    best = grouped.amax(dim=(1, 2))  # [Hkv, M]
    if least == greatest:
        chosen = largest(best, most) & (best > NEG_INF)
    else:
        chosen = in_order(best, spans.unit_nbytes(), room, most)
    if not bool((chosen & (grouped.amin(dim=(1, 2)) == NEG_INF)).any()):
        return Zoom(chosen, group, tokens)  # every head and token wants what any of them does
    return Zoom(chosen, group, tokens, (grouped > NEG_INF) & chosen[:, None, None])


def in_order(best: Tensor, costs: Tensor, room: float, most: int) -> Tensor:
    """bool [Hkv, M]: the units in order of `best` [Hkv, M] until the first whose `costs` [Hkv, M] do not fit into what is left of
    `room` per head, at most `most` of them."""
    likely = int(min(most, 2 * room * costs.numel() / max(1, int(costs.sum())) + 16))
    for count in dict.fromkeys((likely, most)):  # sorting all units to take a few of them is slow
        highest, order = best.topk(count, dim=1)
        together = costs.gather(1, order).cumsum(1)
        if count == most or bool((together[:, -1] > room).all()):
            break
    fits = (together <= room) & (highest > NEG_INF)
    return torch.zeros_like(best, dtype=torch.bool).scatter_(1, order, fits)


def choose_there(
    components: Components, spans: UnitsView, site: AttentionSite, score: Tensor, allowance: float
) -> Zoom:
    """`choose_units` by the kernel, on the device of the scores; what was chosen comes to the host, the scores do not."""
    from semkv.kernels.selection import triton

    there, group = spans.on(score.device), site.group_size
    if components.fill:
        threshold = there.constant(
            "lowest", lambda: torch.full((site.q_heads,), NEG_INF, dtype=torch.float32, device="cpu")
        )
    else:
        name = f"threshold.{site.index}.{site.first_head}"
        threshold = there.constant(name, lambda: components.router.threshold(site).float())
    room = int(min(allowance / site.kv_heads, triton.MAX_ALLOWANCE))
    read, chosen = triton.select_triton(score, threshold, there.costs(spans), room)
    own = read.unflatten(0, (site.kv_heads, group))
    same = bool((own | ~chosen[:, None, None]).all())
    return Zoom(chosen.cpu(), group, score.shape[1], None if same else own.cpu())
