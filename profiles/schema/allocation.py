"""Budgets that follow from a profile's sections, as pure functions: tokens per head and tokens per layer."""

from __future__ import annotations

import math
from collections.abc import Sequence

from semkv.errors import BudgetError

STABILITY_FLOOR = 0.01
"""Stabilities below it count as this much: a head whose sets never meet would otherwise take everything."""


def stability_weight(stability: float) -> float:
    """Share of a compressed head before normalisation: the inverse of its stability (HeteroCache Eq. 8)."""
    return 1 / max(stability, STABILITY_FLOOR)


def head_budgets(stability: Sequence[float], full_heads: int, budget: float, length: int) -> list[int]:
    """Tokens of each compressed head, inversely proportional to its stability (HeteroCache Eq. 7-8).

    Each has at least one token and at most `length`; what the clamp takes from one head goes to the others in proportion
    to their weights. The sum is floor((budget * N - full_heads) * length), or all tokens of all heads if that is less.

    Parameters
    ----------
    stability: of the compressed heads (anchors and satellites), over all layers.
    full_heads: N_full, heads that keep everything (pivots and volatile heads).
    budget: rho, the share of the full KV of all N heads. length: L in tokens.

    Raises
    ------
    BudgetError: Eq. 7 is not positive, or leaves less than a token per head; names the smallest budget that is enough.
    """
    count = len(stability)
    heads = count + full_heads
    if not 0 < budget <= 1:
        raise BudgetError(f"budget is {budget}, expected a share of the full KV in (0, 1]")
    if length < 1:
        raise BudgetError(f"length is {length}, expected at least one token")
    if not count:
        if full_heads > budget * heads:
            raise BudgetError(
                f"budget {budget:g} is too small: all {heads} heads keep every token, so that the smallest budget is 1"
            )
        return []
    # The product of a decimal fraction and a whole number may fall short of a whole number by a rounding.
    total = min(math.floor((budget * heads - full_heads) * length + 1e-6), count * length)
    if total < count:
        smallest = (full_heads + count / length) / heads
        raise BudgetError(
            f"budget {budget:g} leaves nothing for the {count} compressed heads: {full_heads} of {heads} heads keep all "
            f"tokens, {full_heads / heads:.1%} of the KV; the smallest budget is {math.ceil(smallest * 1e4) / 1e4:g} at "
            f"{length} tokens"
        )
    weights = [stability_weight(value) for value in stability]
    return _whole(_water_fill(weights, total, 1.0, float(length)), total, length)


def _water_fill(weights: Sequence[float], total: float, low: float, high: float) -> list[float]:
    """Sizes proportional to `weights` with sum `total`, each within [low, high]; needs n * low <= total <= n * high.

    Fixes the side whose clamp moves more, since it stays clamped, and divides the rest anew.
    """
    sizes = [0.0] * len(weights)
    free = list(range(len(weights)))
    while free:
        room = total - sum(size for i, size in enumerate(sizes) if i not in set(free))
        scale = room / sum(weights[i] for i in free)
        over = [i for i in free if scale * weights[i] > high]
        under = [i for i in free if scale * weights[i] < low]
        excess = sum(scale * weights[i] - high for i in over)
        lack = sum(low - scale * weights[i] for i in under)
        if not over and not under:
            for i in free:
                sizes[i] = scale * weights[i]
            break
        fixed, value = (over, high) if excess >= lack else (under, low)
        for i in fixed:
            sizes[i] = value
        free = [i for i in free if i not in set(fixed)]
    return sizes


def _whole(sizes: Sequence[float], total: int, most: int) -> list[int]:
    """Whole numbers next to `sizes` with sum `total`: the largest remainders are rounded up, of equals the first."""
    whole = [math.floor(size + 1e-9) for size in sizes]
    order = sorted(range(len(sizes)), key=lambda i: (whole[i] - sizes[i], i))
    missing = total - sum(whole)
    while missing > 0:
        for i in order:
            if missing and whole[i] < most:
                whole[i] += 1
                missing -= 1
    return whole


def layer_budgets(
    errors: Sequence[float],
    total: int,
    *,
    minimum: int = 32,
    maximum: int | None = None,
    scale_minimum: bool = False,
) -> list[int]:
    """Tokens of each layer from its error (CompressKV Alg. 1): m, plus a share of the rest, within [m, M].

    What rounding and clipping leave over goes to the layers with the largest errors, what they take too much is taken
    from those with the smallest, so that the sum is exactly `total`.

    Parameters
    ----------
    errors: not negative, of any scale; all zero counts as all equal.
    total: tokens of all layers. minimum: m. maximum: M, by default three times the mean (at least m).
    scale_minimum: lower m to what fits instead of refusing a total below L * m.

    Raises
    ------
    BudgetError: an error is negative or not finite, or `total` is not within [L * m, L * M].
    """
    layers = len(errors)
    if not layers:
        raise BudgetError("errors is empty, expected one per layer")
    bad = [error for error in errors if not (math.isfinite(error) and error >= 0)]
    if bad:
        raise BudgetError(f"errors holds {bad[0]}, expected finite numbers of at least 0")
    if scale_minimum:
        minimum = min(minimum, total // layers)
    if total < max(layers * minimum, 1):
        raise BudgetError(
            f"{total} tokens are too few for {layers} layers of at least {minimum}: give at least {layers * minimum} "
            f"tokens, or a minimum of at most {max(total, 0) // layers}"
        )
    most = max(minimum, -(-3 * total // layers)) if maximum is None else maximum
    if most < minimum or total > layers * most:
        raise BudgetError(
            f"{total} tokens do not fit into {layers} layers of {minimum} to {most}: give at most {layers * most} tokens, "
            f"or a maximum of at least {max(minimum, -(-total // layers))}"
        )
    scale = sum(errors)
    shares = [error / scale if scale > 0 else 1 / layers for error in errors]
    rest = total - layers * minimum
    sizes = [min(max(minimum + round(share * rest), minimum), most) for share in shares]
    left = total - sum(sizes)
    # Alg. 1 moves one token at a time to (from) the layer with the largest (smallest) error that has room.
    for layer in sorted(range(layers), key=lambda i: (-shares[i], i) if left > 0 else (shares[i], i)):
        moved = min(left, most - sizes[layer]) if left > 0 else max(left, minimum - sizes[layer])
        sizes[layer] += moved
        left -= moved
    return sizes
