"""A pretended CUDA device, so that mixing devices is found on machines that have none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

CUDA = torch.device("cuda:0")
CPU = torch.device("cpu")
MARK = "_pretended_cuda"

ANYWHERE = {
    "copy_",
    "__get__",
    "__set__",
    "is_complex",
    "set_",
    "size",
    "dim",
    "numel",
    "stride",
    "item",
    "tolist",
    "__repr__",
    "__format__",
}
"""Functions by name that take tensors of different devices, or look at no values."""

TO_PYTHON = {"numpy", "__array__"}
"""Functions that CUDA tensors refuse."""


def _marked(x: Any) -> bool:
    return isinstance(x, Tensor) and getattr(x, MARK, False)


def mark(x: Any) -> Any:
    """Pretend that the tensors in `x` are on the GPU."""
    for leaf in tree_leaves(x):
        if isinstance(leaf, Tensor):
            setattr(leaf, MARK, True)
    return x


MOVING = {
    "to",
    "cpu",
    "cuda",
    "copy_",
    "clone",
    "contiguous",
    "is_contiguous",
    "empty",
    "view",
    "unbind",
    "split",
    "narrow",
    "flatten",
    "unflatten",
    "expand",
    "element_size",
    "size",
    "dim",
    "numel",
    "stride",
    "data_ptr",
    "storage_offset",
    "untyped_storage",
    "is_pinned",
    "__get__",
    "__getitem__",
    "__setitem__",
}
"""Functions by name that compute nothing."""


class PretendedCuda(TorchFunctionMode):
    """Runs everything on the CPU while tensors made on, or moved to, `cuda` are marked, and marked and unmarked ones may
    not meet where PyTorch would refuse it.

    least: numbers from which on a tensor of the host that something is computed of is noted in `computed`; None: nothing is noted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.least: int | None = None
        self.computed: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func == Tensor.device.__get__:
            return CUDA if _marked(args[0]) else func(*args)  # those of traces are on meta
        if func == Tensor.is_cuda.__get__:
            return _marked(args[0])
        if func == Tensor.is_cpu.__get__:
            return not _marked(args[0])
        if func is torch.device:
            return func(*args, **kwargs)
        if func is Tensor.__iter__:
            parts = args[0].unbind(0)
            return iter([mark(part) for part in parts] if _marked(args[0]) else parts)
        name = getattr(func, "__name__", str(func)).split(".")[0]
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        target = self._target(name, args, kwargs)
        args, kwargs = self._here(args, kwargs)
        if name in TO_PYTHON and any(_marked(x) for x in tensors):
            raise TypeError(f"{name}: cannot convert a CUDA tensor to numpy: call .cpu() first")
        if target is None and name not in ANYWHERE:
            self._check(name, args, tensors)
        if self.least is not None and name not in MOVING:
            large = [x for x in tensors if x.is_floating_point() and x.numel() >= self.least and not _marked(x)]
            self.computed += [f"{name} {tuple(x.shape)}" for x in large]
        result = func(*args, **kwargs)  # in here the mode is off, and every tensor is what it is
        on_gpu = target == "cuda" if target is not None else self._result_on_gpu(name, args, tensors)
        if name == "__set__":
            return result
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                if target is not None and any(leaf is x for x in tensors) and _marked(leaf) != on_gpu:
                    result = leaf = leaf.clone()
                if on_gpu:
                    setattr(leaf, MARK, True)
                elif _marked(leaf):
                    delattr(leaf, MARK)
        return result

    @staticmethod
    def _result_on_gpu(name: str, args: Any, tensors: list[Tensor]) -> bool:
        if name in ("__getitem__", "copy_", "__setitem__") and args:
            return _marked(args[0])
        return any(_marked(x) for x in tensors)

    @staticmethod
    def _target(name: str, args: Any, kwargs: dict[str, Any]) -> str | None:
        """`cuda` or `cpu` where the call names a device."""
        if name in ("cpu", "cuda"):
            return name
        named = kwargs.get("device")
        if named is None and name in ("to", "_to_copy"):
            candidates = [x for x in args[1:] if isinstance(x, (str, torch.device))]
            named = candidates[0] if candidates else None
            others = [x for x in args[1:] if isinstance(x, Tensor)]
            if named is None and others:
                named = "cuda" if _marked(others[0]) else "cpu"
        if named is None:
            return None
        return torch.device(named).type

    @staticmethod
    def _here(args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The same call without a device that does not exist."""

        def local(x: Any) -> Any:
            named = isinstance(x, torch.device) or (isinstance(x, str) and x.split(":")[0] == "cuda")
            return CPU if named and torch.device(x).type == "cuda" else x

        return tuple(local(x) for x in args), {key: local(x) for key, x in kwargs.items() if key != "pin_memory"}

    @staticmethod
    def _check(name: str, args: Any, tensors: list[Tensor]) -> None:
        if name in ("__getitem__", "__setitem__"):
            whole, index = args[0], tree_leaves(args[1])
            if not _marked(whole) and any(_marked(x) for x in index if isinstance(x, Tensor)):
                raise RuntimeError(f"{name}: indices on cuda for a tensor on the CPU")
            return
        wide = [x for x in tensors if x.dim() > 0]
        if any(_marked(x) for x in wide) and not all(_marked(x) for x in wide):
            shapes = ", ".join(f"{'cuda' if _marked(x) else 'cpu'} {tuple(x.shape)}" for x in wide)
            raise RuntimeError(f"{name}: expected all tensors to be on the same device, got {shapes}")


def move(module: nn.Module) -> nn.Module:
    """Pretend that a module is on the GPU."""
    for tensor in (*module.parameters(), *module.buffers()):
        mark(tensor)
    return module


@pytest.fixture(scope="session")
def llama() -> Callable[[int, int, int], LlamaForCausalLM]:
    """`llama(vocab, hidden, heads)`: two layers with random weights, half as many KV heads as heads."""

    def make(vocab: int, hidden: int, heads: int) -> LlamaForCausalLM:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=3 * hidden // 2,
            num_hidden_layers=2,
            num_attention_heads=heads,
            num_key_value_heads=heads // 2,
            max_position_embeddings=1024,
            pad_token_id=0,
        )
        return LlamaForCausalLM(config).eval()

    return make


@pytest.fixture
def pretended_cuda() -> Iterator[Any]:
    """The mode, entered; use `move` and `mark` of the value to place modules and tensors."""
    mode = PretendedCuda()
    mode.move, mode.mark = move, mark
    with mode:
        yield mode
