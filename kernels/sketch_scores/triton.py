"""Sketch scores on the device: what is launched for given tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from semkv.errors import InputError
from semkv.kernels.generation import Launch, padded
from semkv.kernels.sketch_scores.template import normalise_rows, sketch_logits

MAX_ROWS = 16
"""Rows of queries per program."""
CHUNK = 128


def sketch_scores_launches(tables: Tensor, codes: Tensor, *, block: int = 128) -> tuple[Tensor, list[Launch]]:
    """Log-probabilities float32 [H, R, M] over the units of each row of `sketch_logits_reference`, and the launches that write them;
    tables float32 [H, R, S, V], codes uint8 [H, M, S]; `block` units a program."""
    heads, rows, stages, vectors = tables.shape
    if codes.dtype != torch.uint8 or codes.shape[::2] != (heads, stages):
        raise InputError(
            f"codes are {codes.dtype} {tuple(codes.shape)}; expected torch.uint8 ({heads}, units, {stages}) for the heads and stages "
            f"of tables {tuple(tables.shape)}"
        )
    units, every = codes.shape[1], heads * rows
    blocks = -(-units // block)
    out = tables.new_empty((heads, rows, units), dtype=torch.float32)
    top, mass = (tables.new_empty((blocks, heads, rows), dtype=torch.float32) for _ in range(2))
    tile = min(MAX_ROWS, padded(rows))
    lookups: dict[str, Tensor | float | None] = {
        "p_tables": tables.contiguous(),
        "p_codes": codes.contiguous(),
        "p_out": out,
        "p_top": top,
        "p_mass": mass,
        "rows": rows,
        "units": units,
    }
    sums: dict[str, Tensor | float | None] = {
        "p_scores": out,
        "p_top": top,
        "p_mass": mass,
        "rows": every,
        "units": units,
        "blocks": blocks,
    }
    constants = {"STAGES": stages, "VECTORS": vectors, "ROWS": tile, "BLOCK": block}
    grid = (heads, -(-rows // tile), blocks)
    return out, [
        Launch(sketch_logits, grid, lookups, constants, 4, 1),
        Launch(normalise_rows, (every, blocks), sums, {"BLOCK": block, "CHUNK": CHUNK}, 4, 1),
    ]


def sketch_scores_triton(tables: Tensor, codes: Tensor, *, block: int = 128) -> Tensor:
    """What `sketch_scores_launches` computes, on the device of `tables`."""
    out, launches = sketch_scores_launches(tables, codes, block=block)
    for launch in launches:
        launch.run()
    return out
