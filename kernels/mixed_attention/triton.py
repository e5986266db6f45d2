"""Mixed-resolution decode attention on the device: what is launched for given tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from semkv.errors import InputError
from semkv.kernels.generation import Launch, padded
from semkv.kernels.mixed_attention.block_table import FIELDS, PLACE_FIELDS, block_table
from semkv.kernels.mixed_attention.blocks import Biases, Block, flat_blocks, kv_heads_of
from semkv.kernels.mixed_attention.configuration import Configuration
from semkv.kernels.mixed_attention.dispatch import DTYPES, MAX_ROWS
from semkv.kernels.mixed_attention.paged import PagedTokens
from semkv.kernels.mixed_attention.template import decode_partials, merge_partials

MAX_SPLITS = 64


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
    bias on its tokens. Blocks are read where they are, see `block_table`.
    """
    if q.dtype not in DTYPES:
        raise InputError(
            f"q is {q.dtype}; the kernel computes in float16, bfloat16 or float32: cast it, or use `blocked`"
        )
    configuration = configuration or Configuration()
    batch, q_heads, tokens, dim = q.shape
    block = configuration.block or (64 if key_u is None else 32)
    if paged is not None:
        if exact_k is not None:
            raise InputError("exact_k and `paged` are both given; expected one of them")
        kv_heads, value_dim = paged.k.shape[0], paged.v.shape[-1]
    elif exact_k is None or exact_v is None or exact_positions is None:
        raise InputError("exact_k, exact_v and exact_positions are missing: give them, or `paged`")
    else:
        kv_heads, value_dim = kv_heads_of(batch, q_heads, exact_k, exact_heads), exact_v[0].shape[-1]
    if q_heads % kv_heads:
        raise InputError(f"{q_heads} query heads for {kv_heads} KV heads; expected a multiple")
    group = q_heads // kv_heads
    blocks: list[Block] = []
    if exact_k is not None and exact_v is not None and exact_positions is not None:
        blocks += flat_blocks(exact_k, exact_v, exact_positions, exact_bias, exact_heads, group)
    if coarse_k is not None and coarse_v is not None and coarse_positions is not None:
        bias = None if coarse_bias is None else [coarse_bias]
        blocks += flat_blocks([coarse_k], [coarse_v], [coarse_positions], bias, None, group)
    table = block_table(blocks, batch * kv_heads, group, tokens, block, q.dtype) if blocks else None
    paged_bias = exact_bias[0] if paged is not None and exact_bias is not None else None
    spans, length = (0, 1) if key_u is None else key_u.shape[2:4]
    key_rank, value_rank = (0, 0) if key_u is None else (key_u.shape[-1], value_u.shape[-1])

    rows = min(MAX_ROWS, padded(group * tokens))
    block_length = min(block, padded(length))
    programs = batch * kv_heads * -(-group * tokens // rows)
    tiles = (0 if paged is None else -(-paged.capacity // block)) + spans * -(-length // block_length)
    tiles += 0 if table is None else table.tiles
    splits = configuration.splits or splits_for(programs, tiles, _processors(q.device))

    out = q.new_empty((batch, q_heads, tokens, value_dim))
    partial, top, mass = out, None, None
    if splits > 1:
        partial = q.new_empty((splits, *out.shape), dtype=torch.float32)
        top, mass = (q.new_empty((splits, *out.shape[:-1]), dtype=torch.float32) for _ in range(2))

    def dense(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.contiguous()

    def of_kind(tensors: str, kind: int) -> Tensor | None:
        return getattr(table, tensors)[kind] if table is not None and kind < table.kinds else None

    arguments: dict[str, Tensor | float | None] = {
        "p_q": dense(q), "p_where": dense(q_positions), "p_blocks": None if table is None else table.table,
        "p_k": of_kind("k", 0), "p_v": of_kind("v", 0), "p_other_k": of_kind("k", 1), "p_other_v": of_kind("v", 1),
        "p_places": None if table is None else table.positions, "p_bias": None if table is None else table.bias,
        "p_paged_k": None if paged is None else dense(paged.k), "p_paged_v": None if paged is None else dense(paged.v),
        "p_paged_places": None if paged is None else dense(paged.positions), "p_paged_bias": dense(paged_bias),
        "p_pages": None if paged is None else dense(paged.pages), "p_counts": None if paged is None else dense(paged.counts),
        "p_key_u": dense(key_u), "p_key_s": dense(key_s), "p_key_v": dense(key_v),
        "p_value_u": dense(value_u), "p_value_s": dense(value_s), "p_value_v": dense(value_v),
        "p_factored_places": dense(factored_positions), "p_factored_bias": dense(factored_bias),
        "p_sinks": dense(sinks), "p_slopes": dense(bias_slopes), "p_table": dense(bias_table),
        "p_out": partial, "p_top": top, "p_mass": mass,
        "tokens": tokens, "slots": 0 if paged is None else paged.k.shape[1],
        "pages": 0 if paged is None else paged.pages.shape[-1], "spans": spans, "length": length,
        "scale": float(scale), "softcap": float(softcap), "window": window,
    }  # fmt: skip
    constants = {
        "KV_HEADS": kv_heads, "GROUP": group, "DIM": dim, "VALUE_DIM": value_dim,
        "KINDS": 0 if table is None else table.kinds, "PLACE_FIELDS": PLACE_FIELDS, "FIELDS": FIELDS,
        "ALIGNMENT": 1 if table is None else table.alignment, "BIAS": int(table is not None and table.bias is not None),
        "PAGE_SIZE": 0 if paged is None else paged.page_size, "PAGE_HEADS": 0 if paged is None else paged.pages.shape[1],
        "PAGED_PLACES": 0 if paged is None else paged.positions.shape[0], "PAGED_BIAS": _rows_of(paged_bias),
        "KEY_RANK": key_rank, "VALUE_RANK": value_rank,
        "FACTORED_PLACES": 0 if factored_positions is None else factored_positions.shape[1],
        "FACTORED_BIAS": _rows_of(factored_bias),
        "SINKS": int(sinks is not None), "SLOPES": int(bias_slopes is not None),
        "TABLE": 0 if bias_table is None else bias_table.shape[1],
        "SOFTCAP": int(softcap != 0), "WINDOW": int(window != 0),
        "SPLITS": splits, "ROWS": rows, "BLOCK": block, "BLOCK_LENGTH": block_length,
        "BLOCK_DIM": padded(dim), "BLOCK_VALUE": padded(value_dim),
        "BLOCK_KEY_RANK": padded(key_rank), "BLOCK_VALUE_RANK": padded(value_rank),
    }  # fmt: skip
    grid = (batch * kv_heads, -(-group * tokens // rows), splits)
    registers = configuration.registers or (168 if constants["BIAS"] else 128)
    held = () if table is None else table.held
    launches = [
        Launch(
            decode_partials, grid, arguments, constants, configuration.warps, configuration.stages, registers, held,
        )
    ]  # fmt: skip
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
