"""SpeContext's memory model for this model and machine (Eq. 6-8, Alg. 1): weights, working memory, bytes per token and thresholds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from semkv.compiler.offload import weight_bytes
from semkv.errors import BudgetError
from semkv.ir.program import Program
from semkv.profiles.schema import MemoryModel

from .interpreter import Handler, SiteInterpreter, full_attention
from .measure import Measure, Outcome, Sums

DEFAULT_DEVICE = 24 * 10**9
"""Bytes of the device that thresholds are for where the model is on the CPU and none was named: a common accelerator's."""

HEAD_TENSORS = "retrieval_head."
"""Prefix of the tensors of a retrieval head in the profile."""


class LiveBytes(SiteInterpreter):
    """Interprets a body and notes the most bytes that its intermediate values took at once, weights not counted."""

    def __init__(self, program: Program, handler: Handler) -> None:
        super().__init__(program.body, handler)
        tensors = (*program.body.parameters(), *program.body.buffers())
        self.weights = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self.peak = 0

    def run_node(self, n: Node) -> Any:
        """Run a node while its inputs are alive."""
        result = super().run_node(n)
        alive: dict[int, int] = {}
        for value in (result, *self.env.values()):
            for tensor in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(tensor, Tensor):
                    storage = tensor.untyped_storage()
                    alive[storage.data_ptr()] = storage.nbytes()
        self.peak = max(self.peak, sum(size for place, size in alive.items() if place not in self.weights))
        return result


@torch.no_grad()
def working_bytes(program: Program, ids: Tensor) -> int:
    """The most bytes that one pass over ids [T] takes beside the weights.

    From the allocator where CUDA is the device; else of the graph's values, without what an operator allocates for itself.
    """
    positions = torch.arange(len(ids), dtype=torch.int64, device=ids.device)
    live = LiveBytes(program, full_attention)
    if ids.device.type != "cuda":
        live.run(ids[None], positions[None])
        return live.peak
    torch.cuda.synchronize(ids.device)
    torch.cuda.reset_peak_memory_stats(ids.device)
    before = torch.cuda.memory_allocated(ids.device)
    SiteInterpreter(program.body, full_attention).run(ids[None], positions[None])
    torch.cuda.synchronize(ids.device)
    return torch.cuda.max_memory_allocated(ids.device) - before


class Memory(Measure):
    """One pass over a sample and one over a single token; everything else is counted."""

    name = "memory"
    field = "memory_model"

    @property
    def units(self) -> int:
        return 2

    def measure(self, unit: int, sums: Sums) -> None:
        """Unit 0: a whole sample, as in prefill; unit 1: one token, as in decode."""
        _, ids = self.subject.data.measured[0]
        ids = ids[:1] if unit else ids
        sums.add(("prefill", "decode")[unit], float(working_bytes(self.subject.program, ids.to(self.subject.device))))
        if not unit:
            sums.add("tokens", float(len(ids)))

    def finish(self, sums: Sums) -> Outcome:
        """The constants with their thresholds; no section where the device does not hold the model."""
        program, profile = self.subject.program, self.subject.profile
        layers = [site.values_per_token * program.dtype.itemsize for site in self.subject.owners]
        head = (
            [x for name, x in profile.tensors.items() if name.startswith(HEAD_TENSORS)] if profile is not None else []
        )
        device = self.settings.device_memory or self._device_bytes()
        try:
            section = MemoryModel.measured(
                parameter_bytes=weight_bytes(program),
                retrieval_bytes=sum(tensor.nbytes for tensor in head),
                prefill_bytes=int(sums["prefill"]),
                decode_bytes=int(sums["decode"]),
                tokens=int(sums["tokens"]),
                token_bytes=tuple(layers),
                group_size=max(site.group_size for site in self.subject.owners),
                retrieval_token_bytes=max(layers) // 2 if head else 0,
                device_bytes=device,
                rows=self.settings.memory_rows,
                budget=self.settings.memory_budget,
            )
        except BudgetError as error:
            return Outcome(None, note=str(error))
        share = section.runtime_bytes / section.parameter_bytes
        note = (
            f"a device of {device / 1e9:.3g} GB holds all of {section.thresholds[0]} tokens, and {section.thresholds[-1]} with every "
            f"layer on the host; working memory {share:.2f} of the weights"
        )
        return Outcome(section, note=note)

    def _device_bytes(self) -> int:
        device = self.subject.device
        return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else DEFAULT_DEVICE
