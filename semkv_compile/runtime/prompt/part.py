"""What the memory of a part of a store is built from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from semkv.ir.site import AttentionSite
from semkv.runtime.budgets.costs import form_of
from semkv.runtime.components import Components
from semkv.runtime.prompt.record import RowRecord
from semkv.runtime.store.quantization import CODE_BITS, Quantized, quantize


@dataclass(frozen=True)
class PromptPart:
    """What one part of a store is built from: its heads' keys [Hkv, n, D] and values, and the record."""

    site: AttentionSite
    components: Components
    record: RowRecord
    k: Tensor
    v: Tensor

    def held(self, x: Tensor, device: torch.device, *, kept: bool = False) -> Tensor | Quantized:
        """x [Hkv, t, D] as exact tokens are held on `device`, those that stay for good where `kept`."""
        x = x.to(device)
        bits = CODE_BITS.get(form_of(self.components, kept=kept))
        return x if bits is None else quantize(x, bits)

    def newest(self, x: Tensor, count: int, device: torch.device) -> Tensor:
        """A copy on `device` of the last `count` tokens of x [Hkv, n, D]."""
        return x[:, self.record.tokens - count :].to(device, copy=True)

    @property
    def everything(self) -> Tensor:
        return torch.arange(self.record.tokens, dtype=torch.int64, device="cpu")

    @property
    def surprisal(self) -> Tensor:
        known = self.record.surprisal
        return torch.zeros(self.record.tokens, dtype=torch.float32, device="cpu") if known is None else known

    def unit_state(self, recent: Tensor) -> int:
        """Where units stand before the window of tokens `recent`, see `Continuing`."""
        continuing, before = self.components.continuing, self.record.tokens - len(recent)
        return 0 if continuing is None else continuing.state_behind(self.record.ids[:before])
