"""Mixed-resolution decode attention on the device: what is launched for given tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from semkv.errors import InputError
from semkv.kernels.generation import Launch, padded
from semkv.kernels.mixed_attention.blocks import Biases, one_block
from semkv.kernels.mixed_attention.paged import PagedTokens
from semkv.kernels.mixed_attention.template import decode_partials, merge_partials

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_ROWS = 64
MAX_SPLITS = 64


@dataclass(frozen=True)
class Configuration:
    """How the work is laid out; the result depends on it through rounding alone.

    block: entries per tile; 0: 64, or 32 beside factored entries, whose products need the registers. warps, stages: per program,
    stages of the load pipeline. splits: programs that share the entries of one KV head; 0: as many as fill the GPU twice.
    """

    block: int = 0
    warps: int = 4
    stages: int = 2
    splits: int = 0


def splits_for(programs: int, tiles: int, processors: int) -> int:
    """A power of two of splits that makes `programs` about twice the multiprocessors, with a tile for each split."""
    wanted = min(-(-2 * processors // programs), tiles, MAX_SPLITS)
    return 1 << max(0, wanted.bit_length() - 1)


def mixed_attention_launches(
    q: Tensor,
    q_positions: Tensor,
    exact_k: Sequence[Tensor] | None = None,
    exact_v: Sequence[Tensor] | None = None,
    exact_positions: Sequence[Tensor] | None = None,
    exact_bias: Biases = None,
    exact_heads: Sequence[int] | None = None,
    coarse_k: Tensor | None = None,
    coarse_v: Tensor | None = None,
    coarse_positions: Tensor | None = None,
    coarse_bias: Tensor | None = None,
    key_u: Tensor | None = None,
    key_s: Tensor | None = None,
    key_v: Tensor | None = None,
    value_u: Tensor | None = None,
    value_s: Tensor | None = None,
    value_v: Tensor | None = None,
    factored_positions: Tensor | None = None,
    factored_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    bias_slopes: Tensor | None = None,
    bias_table: Tensor | None = None,
    *,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    paged: PagedTokens | None = None,
    configuration: Configuration | None = None,
) -> tuple[Tensor, list[Launch]]:
    """The output [B, Hq, T, Dv] and the launches that write it; nothing runs yet, so tensors may be on `meta`.

    Arguments are those of `mixed_attention_reference`, or `paged` in place of exact_k, exact_v and exact_positions, with the one
    bias on its tokens. The kernel reads one block: several are joined, which copies them, and padded where they are of different
    rows or heads.
    """
    if q.dtype not in DTYPES:
        raise InputError(
            f"q is {q.dtype}; the kernel computes in float16, bfloat16 or float32: cast it, or use `blocked`"
        )
    configuration = configuration or Configuration()
    batch, q_heads, tokens, dim = q.shape
    bias: Tensor | None
    if paged is None:
        if exact_k is None or exact_v is None or exact_positions is None:
            raise InputError("exact_k, exact_v and exact_positions are missing: give them, or `paged`")
        keys, values, places, bias = one_block(
            batch, q_heads, exact_k, exact_v, exact_positions, exact_bias, exact_heads
        )
        kv_heads, exact, slots = keys.shape[1], keys.shape[2], 0
        place_heads = places.shape[1]
    else:
        if exact_k is not None:
            raise InputError("exact_k and `paged` are both given; expected one of them")
        keys, values, places = paged.k, paged.v, paged.positions
        bias = None if exact_bias is None else exact_bias[0]
        kv_heads, slots, exact = paged.k.shape[0], paged.k.shape[1], paged.capacity
        place_heads = paged.positions.shape[0]
    if q_heads % kv_heads:
        raise InputError(f"{q_heads} query heads for {kv_heads} KV heads; expected a multiple")
    value_dim, group = values.shape[-1], q_heads // kv_heads
    coarse = 0 if coarse_k is None else coarse_k.shape[2]
    spans, length = (0, 1) if key_u is None else key_u.shape[2:4]
    key_rank, value_rank = (0, 0) if key_u is None else (key_u.shape[-1], value_u.shape[-1])

    rows = min(MAX_ROWS, padded(group * tokens))
    block = configuration.block or (64 if key_u is None else 32)
    block_length = min(block, padded(length))
    programs = batch * kv_heads * -(-group * tokens // rows)
    tiles = -(-exact // block) + -(-coarse // block) + spans * -(-length // block_length)
    splits = configuration.splits or splits_for(programs, tiles, _processors(q.device))

    out = q.new_empty((batch, q_heads, tokens, value_dim))
    partial, top, mass = out, None, None
    if splits > 1:
        partial = q.new_empty((splits, *out.shape), dtype=torch.float32)
        top, mass = (q.new_empty((splits, *out.shape[:-1]), dtype=torch.float32) for _ in range(2))

    def dense(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.contiguous()

    arguments: dict[str, Tensor | float | None] = {
        "p_q": dense(q), "p_where": dense(q_positions),
        "p_exact_k": dense(keys), "p_exact_v": dense(values), "p_exact_places": dense(places),
        "p_exact_bias": dense(bias),
        "p_pages": None if paged is None else dense(paged.pages), "p_counts": None if paged is None else dense(paged.counts),
        "p_coarse_k": dense(coarse_k), "p_coarse_v": dense(coarse_v), "p_coarse_places": dense(coarse_positions),
        "p_coarse_bias": dense(coarse_bias),
        "p_key_u": dense(key_u), "p_key_s": dense(key_s), "p_key_v": dense(key_v),
        "p_value_u": dense(value_u), "p_value_s": dense(value_s), "p_value_v": dense(value_v),
        "p_factored_places": dense(factored_positions), "p_factored_bias": dense(factored_bias),
        "p_sinks": dense(sinks), "p_slopes": dense(bias_slopes), "p_table": dense(bias_table),
        "p_out": partial, "p_top": top, "p_mass": mass,
        "tokens": tokens, "exact": exact, "slots": slots, "pages": 0 if paged is None else paged.pages.shape[-1],
        "coarse": coarse, "spans": spans, "length": length, "scale": float(scale), "softcap": float(softcap), "window": window,
    }  # fmt: skip
    constants = {
        "KV_HEADS": kv_heads, "GROUP": group, "DIM": dim, "VALUE_DIM": value_dim,
        "EXACT_PLACES": place_heads, "COARSE_PLACES": 0 if coarse_positions is None else coarse_positions.shape[1],
        "FACTORED_PLACES": 0 if factored_positions is None else factored_positions.shape[1],
        "EXACT_BIAS": _rows_of(bias), "COARSE_BIAS": _rows_of(coarse_bias), "FACTORED_BIAS": _rows_of(factored_bias),
        "PAGE_SIZE": 0 if paged is None else paged.page_size, "PAGE_HEADS": 0 if paged is None else paged.pages.shape[1],
        "COARSE": int(coarse > 0), "KEY_RANK": key_rank, "VALUE_RANK": value_rank,
        "SINKS": int(sinks is not None), "SLOPES": int(bias_slopes is not None),
        "TABLE": 0 if bias_table is None else bias_table.shape[1],
        "SOFTCAP": int(softcap != 0), "WINDOW": int(window != 0),
        "SPLITS": splits, "ROWS": rows, "BLOCK": block, "BLOCK_LENGTH": block_length,
        "BLOCK_DIM": padded(dim), "BLOCK_VALUE": padded(value_dim),
        "BLOCK_KEY_RANK": padded(key_rank), "BLOCK_VALUE_RANK": padded(value_rank),
    }  # fmt: skip
    grid = (batch * kv_heads, -(-group * tokens // rows), splits)
    launches = [Launch(decode_partials, grid, arguments, constants, configuration.warps, configuration.stages)]
    if splits > 1:
        count = batch * q_heads * tokens
        merged: dict[str, Tensor | float | None] = {
            "p_partial": partial,
            "p_top": top,
            "p_mass": mass,
            "p_out": out,
            "rows": count,
        }
        sizes = {
            "VALUE_DIM": value_dim, "SPLITS": splits, "BLOCK_SPLITS": triton.next_power_of_2(splits),
            "BLOCK_VALUE": padded(value_dim),
        }  # fmt: skip
        launches.append(Launch(merge_partials, (count,), merged, sizes, 4, 1))
    return out, launches


def mixed_attention_triton(*arguments: Any, fresh: bool = False, **keywords: object) -> Tensor:
    """What `mixed_attention_reference` computes, on the device of `q`; accumulated in float32.

    Arguments are those of `mixed_attention_launches`. `fresh` is taken for the operator's sake: a decode step looks at all
    entries. Tensors that are not contiguous are copied.
    """
    out, launches = mixed_attention_launches(*arguments, **keywords)  # type: ignore[arg-type]
    for launch in launches:
        launch.run()
    return out


def _rows_of(bias: Tensor | None) -> int:
    """The BIAS constant of a bias [B, Hq|1, T|1, ...]."""
    return 0 if bias is None else 1 + 2 * (bias.shape[1] > 1) + 4 * (bias.shape[2] > 1)


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
