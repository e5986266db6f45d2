"""The operators of `semkv.ir.state_ops`, whose shapes and words these are, in PyTorch without a question to the host.

Sizes are those of the tensors alone, so that they can be traced and exported: what is not wanted is written to one more place at the end,
which is cut off. What stands behind a count is never part of a result, not even as a factor of zero.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from semkv.errors import InputError
from semkv.ir.state_ops import EMPTY

NONE = float("-inf")
HALF = torch.finfo(torch.float16)


def append_reference(
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    new_k: Tensor,
    new_v: Tensor,
    new_positions: Tensor,
    at: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """`semkv::append_`."""
    tokens = torch.arange(new_k.shape[2], dtype=torch.int64, device=at.device)
    place = at[:, None] + tokens
    place = (place % torch.full_like(place, k.shape[2]))[:, None, :, None]  # by a tensor, which exports know
    for into, scale, new in ((k, k_scale, new_k), (v, v_scale, new_v)):
        if scale is None:
            into.scatter_(2, place.expand_as(new), new.to(into.dtype))
        else:
            codes, scales = quantized(new, 8 if into.shape[-1] == new.shape[-1] else 4)
            into.scatter_(2, place.expand_as(codes), codes)
            scale.scatter_(2, place.expand_as(scales), scales)
    positions.scatter_(2, place[..., 0], new_positions[:, None].to(positions.dtype))


def quantized(x: Tensor, bits: int = 8) -> tuple[Tensor, Tensor]:
    """Codes uint8 [..., ceil(D * bits / 8)] and scales float16 [..., 1], to the bit those of
    `semkv.runtime.store.quantization.quantize`."""
    top = 2 ** (bits - 1) - 1
    scale = (x.abs().amax(dim=-1, keepdim=True).float() / top).clamp(min=HALF.smallest_normal * HALF.eps, max=HALF.max)
    scale = scale.to(torch.float16)
    codes = (x.float() / scale.float()).round().clamp(-top, top).add(top + 1)
    if bits == 4:  # in arithmetic that there is everywhere
        codes = pad(codes, (0, codes.shape[-1] % 2), value=float(top + 1)).unflatten(-1, (-1, 2))
        codes = codes[..., 0] + 16 * codes[..., 1]
    return codes.to(torch.uint8), scale


def products_reference(q: Tensor, x: Tensor, scale: Tensor | None = None, bits: int = 16) -> Tensor:
    """`semkv::products`."""
    if bits == 16:
        return q @ x.to(q.dtype).mT
    if scale is None:
        raise InputError(f"products with codes of {bits} bits without scale; expected a scale of each vector")
    return q @ (unpacked(x, bits, q.shape[-1]) * scale.to(q.dtype)).mT


def look_up_reference(tables: Tensor, codes: Tensor) -> Tensor:
    """`semkv::look_up`."""
    found = tables.new_zeros((*tables.shape[:3], codes.shape[2]))
    for stage in range(codes.shape[3]):
        at = codes[:, :, None, :, stage].long().expand_as(found)
        found = found + tables[:, :, :, stage].gather(-1, at)
    return found


def scores_reference(logits: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """`semkv::scores`."""
    if not logits.shape[-1]:
        return torch.empty_like(logits), logits.new_full((*logits.shape[:3], 1), NONE)
    there = _first(count, logits.shape[-1])
    x = logits.masked_fill(~there, NONE)
    most = x.amax(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).min)
    x = x - most
    total = x.exp().sum(-1, keepdim=True).log()
    none = total == NONE
    return (x - total.masked_fill(none, 0.0)).masked_fill(~there, NONE), (most + total).masked_fill(none, NONE)


def choose_reference(
    score: Tensor, count: Tensor, room: Tensor, threshold: Tensor | None = None, cost: Tensor | None = None
) -> Tensor:
    """`semkv::choose`."""
    return choose_each_reference(score, count, room, threshold, cost)[0]


def choose_each_reference(
    score: Tensor, count: Tensor, room: Tensor, threshold: Tensor | None = None, cost: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`semkv::choose_each`."""
    wanted = (score > NONE) & _first(count, score.shape[-1])
    if threshold is not None:
        wanted = wanted & (score > threshold[:, :, None])
    best = (score.masked_fill(~wanted, NONE) + 0.0).amax(2)  # zeros of both signs are one number
    each = torch.ones_like(best, dtype=torch.int64) if cost is None else cost.long().expand_as(best)
    room = room[:, None, None]
    ordered, order = torch.sort(best, dim=-1, descending=True)
    over = each.gather(-1, order).cumsum(-1) > room
    # Units that are better than the first one that is not paid for are, in whatever order equal ones came; of its equals the first are.
    last = torch.where(over, ordered, NONE).amax(-1, keepdim=True) if best.shape[-1] else NONE
    equal = (best == last) & (best > NONE)
    paid = torch.where(best > last, each, 0).sum(-1, keepdim=True) + torch.where(equal, each, 0).cumsum(-1)
    chosen = (best > last) | (equal & (paid <= room))
    return chosen, wanted & chosen[:, :, None]


def unfold_by(
    copy: Callable[..., object],
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    slots: Tensor,
    chosen: Tensor,
    host_k: Tensor,
    host_v: Tensor,
    start: Tensor,
    shift: Tensor,
    length: int,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    host_k_scale: Tensor | None = None,
    host_v_scale: Tensor | None = None,
    bounds: Tensor | None = None,
    order: Tensor | None = None,
    where: Tensor | None = None,
) -> Tensor:
    """`semkv::unfold_`, in which `copy` does what `copy_reference` does. Tokens for which there is no slot are left out; what stood in a
    slot that is let go of stays there."""
    capacity, waiting = slots.shape[2], host_k.shape[2]
    if bounds is None:
        wanted = _even(chosen, start, length, waiting)
    else:
        wanted = _between(chosen, bounds, waiting)
    token = torch.arange(waiting, dtype=torch.int64, device=slots.device) if order is None else order.long()
    places = torch.where(wanted, token, waiting)  # of the wanted tokens, in the order of their units
    stays = _marks(places, wanted, waiting).gather(2, torch.where(slots < 0, waiting, slots.long()))
    there = _marks(torch.where(stays, slots.long(), waiting), stays, waiting)
    missing = wanted & ~there.gather(2, places)

    nth = torch.where(missing, missing.cumsum(2) - 1, capacity).clamp(max=capacity)
    sources = slots.new_zeros((*slots.shape[:2], capacity + 1), dtype=torch.int64).scatter(2, nth, places)
    rank = (~stays).cumsum(2) - 1  # of a free slot among those of its head
    copied = ~stays & (rank < missing.sum(2, keepdim=True))
    source = torch.where(copied, sources.gather(2, rank.clamp(min=0)), 0)
    if waiting:
        position = source + shift[:, None, None]
        if where is not None:
            position = where[:, None].expand(-1, slots.shape[1], -1).gather(2, source)
        positions.copy_(torch.where(copied, position, torch.where(stays, positions, EMPTY)))
        slots.copy_(torch.where(copied, source, torch.where(stays, slots, -1)))
        for host, host_scale, into, scale in ((host_k, host_k_scale, k, k_scale), (host_v, host_v_scale, v, v_scale)):
            copy(host, host_scale, into, scale, source, copied)
    else:
        positions.fill_(EMPTY)
        slots.fill_(-1)
    return torch.stack((copied.sum((1, 2)), stays.sum((1, 2))), dim=1)


def coarse_attention_reference(
    score: Tensor,
    shift: Tensor,
    chosen: Tensor,
    count: Tensor,
    codes: Tensor,
    books: Tensor,
    mean: Tensor,
    softcap: float = 0.0,
    own: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`semkv::coarse_attention`: weights are added up by code, and each stage's sums meet its book once."""
    rest = ~(chosen[:, :, None] if own is None else own) & _first(count, score.shape[-1])
    logits = score + shift
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    shares, mass = scores_reference(logits.masked_fill(~rest, NONE), count)
    weights = shares.exp()
    value = mean[None, :, None] * (mass > NONE)
    for stage in range(codes.shape[3]):
        at = codes[:, :, None, :, stage].long().expand_as(weights)
        sums = weights.new_zeros((*weights.shape[:3], books.shape[2])).scatter_add(-1, at, weights)
        value = value + sums @ books[:, stage]
    return value, mass[..., 0]


def factored_attention_reference(
    q: Tensor,
    chosen: Tensor,
    held: Tensor,
    data: Tensor,
    where: Tensor,
    spans: Tensor,
    unit: Tensor,
    asked: Tensor,
    value_dim: int,
    longest: int,
    rank: int,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    own: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`semkv::factored_attention_`, with every span padded to the largest."""
    first, *ranks = where.unbind(-1)
    length, position = spans.unbind(-1)
    unit = unit.expand_as(first)
    there, at = unit >= 0, unit.clamp(min=0)
    read = chosen.gather(2, at) & there
    sides = []
    for own_rank, dim in zip(ranks, (q.shape[3], value_dim)):
        made = []
        for size, rows, many in (
            (longest, length[:, None], True),
            (1, torch.ones_like(length)[:, None], False),
            (dim, None, True),
        ):
            part = _padded_factor(data, first, own_rank, rows, size, rank)
            made.append(part if many else part.squeeze(3))
            first = first + own_rank * (dim if rows is None else rows)
        sides.append(made)
    (key_u, key_s, key_v), (value_u, value_s, value_v) = sides
    products = torch.einsum("bhrd,bhfdc->bhrfc", q, key_v) * key_s[:, :, None] * scale
    logits = torch.einsum("bhrfc,bhflc->bhrfl", products, key_u)
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    token = torch.arange(longest, dtype=torch.int64, device=q.device)
    away = asked[:, None, None] - position[..., None] - token
    inside = (token < length[..., None]) & (away >= 0)
    inside = inside & (away < window) if window else inside
    reads = (
        read[:, :, None]
        if own is None
        else own.gather(3, at[:, :, None].expand(-1, -1, own.shape[2], -1)) & read[:, :, None]
    )
    seen = reads[..., None] & inside[:, None, None]
    shares, mass = scores_reference(
        logits.masked_fill(~seen, NONE).flatten(3), torch.full_like(asked, logits[0, 0, 0].numel())
    )
    weights = torch.einsum("bhrfl,bhflc->bhrfc", shares.exp().view_as(logits), value_u) * value_s[:, :, None]
    value = torch.einsum("bhrfc,bhfdc->bhrd", weights, value_v)
    taken = sum(r * (length[:, None] + 1 + dim) for r, dim in zip(ranks, (q.shape[3], value_dim))) * data.itemsize
    told = torch.stack([torch.where(part, taken, 0).sum((1, 2)) for part in (read & ~held, read & held)], -1)
    held.copy_(read)
    return value, mass[..., 0], told


def _padded_factor(data: Tensor, first: Tensor, rank: Tensor, rows: Tensor | None, size: int, most: int) -> Tensor:
    """Factors [rows, rank] from their first places int64 [B, H, F] in data [B, n] on, float32 [B, H, F, size, most], 0 where there are
    fewer; rows None: `size`."""
    row, column = (torch.arange(n, dtype=torch.int64, device=data.device) for n in (size, most))
    row = row[:, None]
    valid = (column < rank[..., None, None]).expand(*rank.shape, size, -1)
    valid = valid if rows is None else valid & (row < rows[..., None, None])
    place = torch.where(valid, first[..., None, None] + row * rank[..., None, None] + column, 0)
    return torch.where(valid, data.gather(1, place.flatten(1)).view(place.shape).float(), 0.0)


# -- parts of them -----------------------------------------------------------------------------------------------------


def _first(count: Tensor, size: int) -> Tensor:
    """The first count[b] of `size`, bool [B, 1, 1, size]."""
    return (torch.arange(size, dtype=torch.int64, device=count.device) < count[:, None])[:, None, None]


def _even(chosen: Tensor, start: Tensor, length: int, waiting: int) -> Tensor:
    """Whether the token at each place is one of a chosen unit, bool [B, H, N], where unit u has `length` from start[b] + u * length on."""
    units = chosen.shape[2]
    inside = torch.arange(waiting, dtype=torch.int64, device=start.device) - start[:, None]
    unit = torch.div(inside, max(length, 1), rounding_mode="floor")
    unit = torch.where((inside >= 0) & (inside < units * length), unit, units)
    return pad(chosen, (0, 1)).gather(2, unit[:, None].expand(-1, chosen.shape[1], -1))


def _between(chosen: Tensor, bounds: Tensor, waiting: int) -> Tensor:
    """Whether each number n < N lies within the bounds of a chosen unit, bool [B, H, N]."""
    edges = torch.zeros((*chosen.shape[:2], waiting + 1), dtype=torch.int32, device=chosen.device)
    for side, step in ((bounds[..., :-1], 1), (bounds[..., 1:], -1)):
        at = torch.where(chosen, side.long(), waiting)
        edges = edges.scatter_add(2, at, torch.full_like(at, step, dtype=torch.int32))
    return edges.cumsum(2)[..., :waiting] > 0


def _marks(places: Tensor, true: Tensor, waiting: int) -> Tensor:
    """bool [B, H, N + 1]: what is `true` of places int64 [B, H, n]; place N is false."""
    marks = torch.zeros((*places.shape[:2], waiting + 1), dtype=torch.bool, device=places.device)
    return marks.scatter(2, places, true)


def unpacked(x: Tensor, bits: int, dim: int | None = None) -> Tensor:
    """Codes uint8 [..., ceil(dim * bits / 8)] less the middle one, float32 [..., dim]; dim None: as many as there are."""
    codes = x.float()
    if bits == 4:  # in arithmetic that there is everywhere
        upper = (codes / 16).floor()
        codes = torch.stack((codes - 16 * upper, upper), dim=-1).flatten(-2)
        codes = codes if dim is None else codes[..., :dim]
    return codes - 2 ** (bits - 1)


def copy_reference(
    host: Tensor, host_scale: Tensor | None, into: Tensor, scale: Tensor | None, source: Tensor, copied: Tensor
) -> None:
    """Write the tokens at source int64 [B, H, C] to the slots that are copied bool [B, H, C]."""
    kept = (host_scale is None) == (scale is None)
    if host.dtype != (into.dtype if kept else torch.uint8) or (host_scale is None and not kept):
        raise InputError(
            f"tokens wait as {host.dtype} {'with' if host_scale is not None else 'without'} scales for slots of {into.dtype} "
            f"{'with' if scale is not None else 'without'} them; expected the same dtype, or codes uint8 with scales"
        )
    index, copied = source[..., None].to(host.device), copied[..., None]
    found = host.gather(2, index.expand(-1, -1, -1, host.shape[3]))
    scales = None if host_scale is None else host_scale.gather(2, index)
    if scale is not None:
        scale.copy_(torch.where(copied, scales.to(scale.device), scale))
    elif scales is not None:
        found = (unpacked(found, 8) * scales.float()).to(into.dtype)
    into.copy_(torch.where(copied, found.to(into.device), into))


unfold_reference = partial(unfold_by, copy_reference)
"""`semkv::unfold_`."""

__all__ = [
    "append_reference",
    "choose_each_reference",
    "choose_reference",
    "coarse_attention_reference",
    "copy_reference",
    "factored_attention_reference",
    "look_up_reference",
    "products_reference",
    "quantized",
    "scores_reference",
    "unfold_by",
    "unfold_reference",
    "unpacked",
]
