"""Copies between a device and the host tier that run beside the device's work."""

from __future__ import annotations

import torch
from torch import Tensor


class DeviceCopies:
    """On a CUDA device, copies to page-locked memory on a stream of their own; elsewhere plain copies.

    Copies are made head by head: a part [H, t, ...] of a longer tensor is contiguous in each head only, and a copy between device
    and host that is not contiguous on both sides is staged, and awaited, by PyTorch.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" and torch.cuda.is_available() else None

    @property
    def pinned(self) -> bool:
        """Whether the host's side should be page-locked."""
        return self.stream is not None

    def to_host(self, target: Tensor, source: Tensor) -> None:
        """Copy `source` [H, t, ...] into `target` of the same shape, once the device has computed it."""
        if self.stream is None:
            target.copy_(source)
            return
        source = source.to(target.dtype).contiguous()
        self.stream.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(self.stream):
            for place, part in zip(target, source):
                place.copy_(part, non_blocking=True)
        source.record_stream(self.stream)

    def to_device(self, target: Tensor, source: Tensor) -> None:
        """Copy `source` [H, t, ...] of the host, which `to_host` wrote, into `target`."""
        if self.stream is None:
            target.copy_(source)
            return
        torch.cuda.current_stream(target.device).wait_stream(self.stream)
        for place, part in zip(target, source):
            place.copy_(part, non_blocking=True)

    def finish(self) -> None:
        """Wait until the host may read everything that `to_host` copied."""
        if self.stream is not None:
            self.stream.synchronize()
