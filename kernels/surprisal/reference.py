"""Surprisal as it is defined: all logits, their log-softmax, the target's place in it."""

from __future__ import annotations

import torch
from torch import Tensor


def surprisal_reference(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, *, softcap: float = 0.0
) -> Tensor:
    """-log p(target) in nats, float32 [n] (SeKV Eq. 1): hidden [n, H], weight [V, H] and bias [V] of the LM head, targets int64 [n].

    softcap: of the logits, 0 for none. Logits are made in the dtype of `hidden`; float64 inputs give float64.
    """
    logits = hidden @ weight.T
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if bias is not None:
        logits = logits + bias.to(logits.dtype)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    return -logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
