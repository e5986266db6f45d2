"""A prompt that is read piece by piece into a record, each piece after those before it."""

from __future__ import annotations

import torch
from torch import Tensor

from semkv.ir.program import Program
from semkv.runtime.host.tier import HostTier
from semkv.runtime.prompt.content import Content
from semkv.runtime.prompt.record import RowRecord, head_orders, key_balances, next_surprisal
from semkv.runtime.prompt.recorder import Recorder


class Prefill:
    """One prompt on its way through the prefill and extend programs.

    tokens: how many there will be, where that is known: memory for them is made once; else it grows, and the record is copied at the
    end. What the record holds does not depend on the pieces but for the order of sums.
    """

    def __init__(
        self,
        program: Program,
        kv_dtype: torch.dtype,
        device: torch.device,
        *,
        surprisal: bool,
        all_queries: bool = False,
        tier: HostTier | None = None,
        tokens: int | None = None,
    ) -> None:
        self.program, self.device = program, device
        nothing = torch.empty(0, dtype=torch.int64, device="cpu")
        self.record = RowRecord(
            ids=nothing, all_queries=all_queries, head_orders=head_orders(program), balances=key_balances(program)
        )
        if surprisal:
            self.record.surprisal = torch.empty(0, dtype=torch.float32, device="cpu")
        self._recorder = Recorder(
            program, self.record, kv_dtype, HostTier() if tier is None else tier, device, tokens=tokens
        )
        self._ids: list[Tensor] = []
        self._surprisal: list[Tensor] = []
        self._last: Tensor | None = None

    @property
    def read(self) -> int:
        """Tokens so far."""
        return self._recorder.past

    @property
    def next_rotary(self) -> int:
        """The rotary position of the next token, in all axes."""
        return self.read + self.record.turned

    def feed(self, ids: Tensor, content: Content | None = None) -> Tensor:
        """Read the next tokens int64 [t], of the device, at least one -> hidden states [1, t, H]. content: what they are besides ids,
        which are negative where nobody knows them."""
        program, start, end = self.program, self.read, self.read + len(ids)
        alone = len(ids) == 1 and content is None
        together = content is not None and bool(content.blocks)
        graph = program.prefill if start == 0 and not together else program.decode if alone else program.extend
        positions = torch.arange(start, end, dtype=torch.int64, device=self.device)[None]
        self._recorder.content = content
        hidden = graph(ids.clamp(min=0)[None], positions, self._recorder)
        if self.record.surprisal is not None:
            self._surprisal.append(self._surprisal_of(ids, hidden[0]))
        self._ids.append(ids.cpu())
        self._recorder.advance(len(ids))
        return hidden

    def _surprisal_of(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """float32 [t] of ids [t] with hidden states [t, H]: of each token given those before it, 0 for the first of all and for those
        whose id nobody knows."""
        before, self._last = self._last, hidden[-1:].clone()
        if before is None:
            return torch.nn.functional.pad(next_surprisal(self.program.head, hidden[:-1], ids[1:]), (1, 0))
        return next_surprisal(self.program.head, torch.cat([before, hidden[:-1]]), ids)

    def finish(self) -> RowRecord:
        """The record of all that was read, at least one token; its logits are the caller's to set."""
        record = self.record
        record.ids = torch.cat(self._ids)
        if record.surprisal is not None:
            record.surprisal = torch.cat(self._surprisal)
        self._recorder.finish()
        return record


__all__ = ["Prefill"]
