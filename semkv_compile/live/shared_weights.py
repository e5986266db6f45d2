"""A compiled model as a module: its weights are those of the model that was compiled, to be read and not to be changed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from semkv.errors import ConfigError
from semkv.ir.program import Program

INSTEAD = {
    "save_pretrained": "compiled.save(path) writes it, semkv.load(path) reads it",
    "push_to_hub": "compiled.save(path) writes a folder, which can be uploaded",
    "resize_token_embeddings": "resize those of the model and compile it again",
    "get_input_embeddings": "ask the model that was compiled",
    "get_output_embeddings": "ask the model that was compiled",
    "gradient_checkpointing_enable": "a compiled model does not train; train the model that was compiled",
    "enable_input_require_grads": "a compiled model does not train; train the model that was compiled",
}
"""Attributes of Hugging Face models that a compiled one has not, and what to do."""


class SharedWeights(nn.Module):
    """The face of `torch.nn.Module`: what reads weights works, what would change them is refused, as they are another model's."""

    _source: Program

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        for tensor in chain(self.parameters(), self.buffers()):
            return tensor.device
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the parameters that attention computes in."""
        return self._source.dtype

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of the model that was compiled, under its names."""
        return self._named("named_parameters", prefix, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """The buffers that the program reads, under the names of the model that was compiled."""
        return self._named("named_buffers", prefix, remove_duplicate)

    def _named(self, kind: str, prefix: str, remove_duplicate: bool) -> Iterator[tuple[str, Any]]:
        names, tensors = set(), set()
        for graph in (self._source.body, self._source.head):
            for name, tensor in (
                () if graph is None else getattr(graph, kind)(prefix, remove_duplicate=remove_duplicate)
            ):
                if name not in names and not (remove_duplicate and id(tensor) in tensors):
                    names.add(name)
                    tensors.add(id(tensor))
                    yield name, tensor

    def num_parameters(self) -> int:
        """Numbers in the parameters, each counted once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """The weights by name, detached."""
        named = chain(self.named_parameters(remove_duplicate=False), self.named_buffers(remove_duplicate=False))
        return {name: tensor.detach() for name, tensor in named}

    def load_state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ConfigError(
            "load_state_dict: a compiled model reads the weights of the model it was made of; load them there"
        )

    def tie_weights(self, *args: Any, **kwargs: Any) -> None:
        """What is tied in the model is tied here: there is nothing to do."""

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """This model, where it is on that device and of that dtype already.

        Raises
        ------
        ConfigError: another device or dtype, which the model and its states would have to follow.
        """
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        if device is not None and (device.type, device.index or 0) != (self.device.type, self.device.index or 0):
            raise ConfigError(
                f"to({str(device)!r}): a compiled model stays on {str(self.device)!r}, where its states are; "
                f"semkv.compile(model, device={str(device)!r}) makes one there"
            )
        if dtype is not None and dtype != self.dtype:
            raise ConfigError(
                f"to({dtype}): a compiled model computes in {self.dtype}, as the model that it shares weights with; convert that one "
                "and compile it again, or hold keys and values in another dtype: CompileConfig(kv_dtype=...)"
            )
        return self

    def cpu(self) -> Any:
        return self.to("cpu")

    def cuda(self, device: int | torch.device | None = None) -> Any:
        return self.to(torch.device("cuda") if device is None else torch.device(device))

    def half(self) -> Any:
        return self.to(torch.float16)

    def bfloat16(self) -> Any:
        return self.to(torch.bfloat16)

    def float(self) -> Any:
        return self.to(torch.float32)

    def double(self) -> Any:
        return self.to(torch.float64)

    def type(self, dst_type: Any) -> Any:
        return self.to(dst_type)

    def train(self, mode: bool = True) -> Any:
        """Only `train(False)`: a compiled model has no gradients and no dropout."""
        if mode:
            raise ConfigError("train(): a compiled model does not train; train the model that was compiled")
        return super().train(False)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Only `requires_grad_(False)`, which changes nothing: a compiled model computes no gradients."""
        if requires_grad:
            raise ConfigError(
                "requires_grad_(): a compiled model computes no gradients; train the model that was compiled"
            )
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> NoReturn:
        raise ConfigError(
            "the weights of a compiled model are those of the model that was compiled: change that one and compile it again"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy with weights of its own."""
        made = self.__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def __copy__(self) -> Any:
        """Another object with the same program and weights."""
        made = self.__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ConfigError(
            "compiled models are not pickled: compiled.save(path) writes one, semkv.load(path) reads it in this or another process"
        )

    def __getattr__(self, name: str) -> Any:
        if name in INSTEAD:
            raise AttributeError(f"a compiled model has no {name!r}: {INSTEAD[name]}")
        return super().__getattr__(name)


__all__ = ["SharedWeights"]
