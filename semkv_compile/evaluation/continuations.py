"""What a compiled model thinks of continuations of a context that it has read and compressed before."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from semkv.compiled import CompiledModel
from semkv.errors import InputError
from semkv.runtime.modes import undisturbed


def is_compressed(compiled: CompiledModel, tokens: int) -> bool:
    """Whether a context of so many tokens is too long for the budget to hold it whole."""
    placement = compiled.placement
    budget, stores = placement.budget, placement.budgeted
    if budget.value is None or budget.exact(tokens) or not stores:
        return False
    return budget.cap_bytes(stores, tokens) < sum(budget.full_bytes(store, tokens) for store in stores)


@undisturbed
def score_continuations(
    compiled: CompiledModel,
    context: Sequence[int],
    continuations: Sequence[Sequence[int]],
    *,
    dtype: torch.dtype | None = None,
) -> list[tuple[float, bool]]:
    """(sum of log probabilities in nats, whether each token is the most probable one) of each continuation, ids of at least one token.

    The context, ids of at least one token, is read and compressed once; each continuation is read over a copy of its state. So all
    tokens of a continuation but the first are predicted from what the budget has left of the context, and the first, as in
    generation, from the logits of the whole prompt. dtype: of the softmax; None: of the logits.

    Raises
    ------
    InputError: a context or a continuation without tokens, or both together beyond the model's context.
    """
    if not context or any(not one for one in continuations):
        raise InputError(
            "a context and its continuations have at least one token each: put the prefix token before an empty context"
        )
    state = compiled.prefill(torch.tensor([list(context)], dtype=torch.int64, device="cpu"))
    scores = []
    for number, own in enumerate(continuations):
        ids = torch.tensor([list(own)], dtype=torch.int64, device=compiled.device)
        logits = [state.logits[:, None]]
        if len(own) > 1:
            going = state if number == len(continuations) - 1 else state.fork()
            logits.append(compiled.extend(going, ids[:, :-1], all_logits=True))
        logp = torch.log_softmax(torch.cat(logits, 1)[0], -1, dtype=dtype)
        likeliest = logp.argmax(-1)
        scores.append((float(logp.gather(1, ids.T).sum()), bool((likeliest == ids[0]).all())))
    return scores


__all__ = ["is_compressed", "score_continuations"]
