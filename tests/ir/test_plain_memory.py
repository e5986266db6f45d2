"""The memory that keeps everything, which the others are compared with."""

from __future__ import annotations

import torch

from semkv.ir.plain_memory import PlainMemory
from semkv.ir.site import AttentionSite


def site(index: int, store: int) -> AttentionSite:
    return AttentionSite(index, f"layers.{index}", store, q_heads=2, kv_heads=1, key_dim=4, value_dim=3, scale=1.0)


def tokens(start: int, count: int):
    k, v = torch.randn(1, 1, count, 4), torch.randn(1, 1, count, 3)
    return torch.randn(1, 2, count, 4), k, v, torch.arange(start, start + count)[None]


def test_tokens_are_kept_in_order():
    memory = PlainMemory([site(0, 0)])
    first, second = tokens(0, 5), tokens(5, 2)
    memory.record(0, *first)
    entries = memory.entries(0, *second)
    assert torch.equal(entries.block_k[0], torch.cat((first[1], second[1]), 2))
    assert torch.equal(entries.block_v[0], torch.cat((first[2], second[2]), 2))
    assert entries.block_positions[0].tolist() == [[list(range(7))]]


def test_a_shared_store_is_written_once():
    memory = PlainMemory([site(0, 0), site(1, 0)])
    memory.record(0, *tokens(0, 5))
    memory.record(1, *tokens(0, 5))
    new = tokens(5, 1)
    assert memory.entries(0, *new).block_k[0].shape[2] == 6
    assert memory.entries(1, *new).block_k[0].shape[2] == 6


def test_keep_drops_tokens_of_a_prompt():
    memory = PlainMemory([site(0, 0)], keep=lambda positions: positions[0] % 2 == 0)
    memory.record(0, *tokens(0, 6))
    assert memory.entries(0, *tokens(6, 1)).block_positions[0].tolist() == [[[0, 2, 4, 6]]]
