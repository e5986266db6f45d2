"""Random entries of every kind for `semkv::mixed_attention`, and the device that runs Triton kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields, is_dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

from semkv.ir.memory import Entries
from semkv.runtime.store.quantization import quantize


@pytest.fixture
def filled_with_nan() -> Iterator[None]:
    """What is allocated and not written shows, scratch too."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def nothing_is_written_by_luck(monkeypatch):
    """What a call allocates is full of what is no number, or of ones, until it is written."""

    def empty(*shape, **keywords):
        made = real(*shape, **keywords)
        if made.device.type == "cpu":
            made.fill_(float("nan") if made.is_floating_point() else 1)
        return made

    real = torch.empty
    monkeypatch.setattr(torch, "empty", empty)


def make_entries(
    *,
    batch: int = 2,
    tokens: int = 3,
    q_heads: int = 4,
    kv_heads: int = 2,
    dim: int = 6,
    value_dim: int | None = None,
    exact: int = 7,
    coarse: int = 0,
    bits: tuple[int, int] = (0, 0),
    spans: int = 0,
    length: int = 5,
    rank: int = 3,
    heads_of_positions: int | None = None,
    biased: bool = False,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, Entries]:
    """(q [B, Hq, T, D], q_positions [B, T], entries) with positions before the queries, but for some exact ones: a block of exact
    entries, then one of coarse ones, whose keys and values are codes of `bits` where that is not 0."""
    generator = torch.Generator().manual_seed(seed)
    value_dim = value_dim or dim

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    def places(*shape: int, high: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator)

    def bias(*shape: int) -> torch.Tensor:
        """Absent entries, never all of a query's: the last place stays."""
        absent = torch.rand(*shape, generator=generator) < 0.3
        absent[..., -1] = False
        return numbers(*shape).masked_fill(absent, float("-inf"))

    heads = kv_heads if heads_of_positions is None else heads_of_positions
    q = numbers(batch, q_heads, tokens, dim)
    q_positions = 50 + torch.arange(tokens).expand(batch, -1)
    fields: dict[str, Any] = {
        "block_k": [numbers(batch, kv_heads, exact, dim)],
        "block_v": [numbers(batch, kv_heads, exact, value_dim)],
        "block_positions": [places(batch, heads, exact, high=50 + tokens)],
    }
    fields["block_positions"][0][..., -1] = 49
    if biased:
        fields["block_bias"] = [bias(batch, q_heads, tokens, exact)]
    if coarse:
        for name, size, width in (("k", dim, bits[0]), ("v", value_dim, bits[1])):
            means = numbers(batch, kv_heads, coarse, size)
            packed = quantize(means, width) if width else None
            fields[f"block_{name}"].append(means if packed is None else packed.codes)
            if packed is not None:
                fields[f"block_{name}_scale"] = [None, packed.scale]
        fields["block_positions"].append(places(batch, 1, coarse, high=50))
        fields["block_bias"] = [*fields.get("block_bias", [None]), bias(batch, 1, 1, coarse)]
    if spans:
        fields |= {
            "key_u": numbers(batch, kv_heads, spans, length, rank),
            "key_s": numbers(batch, kv_heads, spans, rank).abs(),
            "key_v": numbers(batch, kv_heads, spans, dim, rank),
            "value_u": numbers(batch, kv_heads, spans, length, rank),
            "value_s": numbers(batch, kv_heads, spans, rank).abs(),
            "value_v": numbers(batch, kv_heads, spans, value_dim, rank),
            "factored_positions": places(batch, heads, spans, length, high=50),
            "factored_bias": bias(batch, q_heads, tokens, spans, length),
        }
    return q, q_positions, Entries(**fields)


@pytest.fixture(scope="session")
def entries() -> Callable[..., tuple[torch.Tensor, torch.Tensor, Entries]]:
    """See `make_entries`."""
    return make_entries


@pytest.fixture(scope="session")
def on_device() -> Iterator[Callable[..., Any]]:
    """`on_device(function, *args, **kwargs)` on the GPU where there is one, else in Triton's interpreter, on the CPU.

    The interpreter is decided on when triton is imported, so it has a process of its own. Memory that a function allocates
    is filled with NaN, so that what it does not write shows.
    """
    pytest.importorskip("triton", reason='kernels need triton: pip install -e ".[triton]"')
    if torch.cuda.is_available():
        yield _on_gpu
        return
    with pytest.MonkeyPatch.context() as patch, ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        patch.setenv("TRITON_INTERPRET", "1")
        pool.submit(torch.use_deterministic_algorithms, True).result()
        here = Path(__file__).parent
        pool.submit(exec, f"import sys; sys.path.insert(0, {str(here.parents[1])!r})", {}).result()
        pool.submit(exec, (here / "interpreted_bfloat16.py").read_text(), {}).result()
        patch.undo()
        yield lambda function, *args, **kwargs: pool.submit(function, *args, **kwargs).result()


def _on_gpu(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    def moved(x: Any, device: str) -> Any:
        if hasattr(x, "_fields") or isinstance(x, (list, tuple)):
            parts = [moved(part, device) for part in x]
            return type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)
        if isinstance(x, dict):
            return {name: moved(part, device) for name, part in x.items()}
        if is_dataclass(x):
            return replace(x, **{field.name: moved(getattr(x, field.name), device) for field in fields(x)})
        return x.to(device) if isinstance(x, torch.Tensor) else x

    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        out = function(*moved(args, "cuda"), **{name: moved(x, "cuda") for name, x in kwargs.items()})
        return moved(out, "cpu")
    finally:
        torch.use_deterministic_algorithms(False)
