"""The table by which one launch finds blocks: offsets lead to the entries, and nothing is copied that need not be."""

from __future__ import annotations

import torch

from semkv.kernels.mixed_attention.block_table import FIELDS, PLACE_FIELDS, block_table
from semkv.kernels.mixed_attention.blocks import Block
from semkv.runtime.store.quantization import Quantized, dequantize, quantize

DIMS = (16, 16)


def block(first: int, heads: int, count: int, *, dtype: torch.dtype = torch.float16, bias: bool = False) -> Block:
    """A block of dim 16 whose entries are the front of longer rows."""
    k, v = (torch.randn(heads, count + 3, 16).to(dtype)[:, :count] for _ in range(2))
    own = torch.randn(heads, 2, 1, count) if bias else None
    return Block(first, k, v, torch.arange(count, dtype=torch.int32).expand(heads, -1), own)


def coded(first: int, heads: int, count: int, k_bits: int, v_bits: int) -> Block:
    """A block of dim 16 in codes."""
    k, v = (quantize(torch.randn(heads, count, 16), bits) for bits in (k_bits, v_bits))
    positions = torch.arange(count, dtype=torch.int32)[None]
    return Block(first, k.codes, v.codes, positions, None, k.scale, v.scale, k_bits, v_bits)


def read(x: torch.Tensor, base: torch.Tensor, offset: int, count: int) -> torch.Tensor:
    """`count` numbers at `offset` from the first of `base`, wherever they are: by the address that the kernel computes."""
    at = base.data_ptr() + offset * base.element_size() - x.data_ptr()
    assert at % x.element_size() == 0
    return x.as_strided((count,), (1,), x.storage_offset() + at // x.element_size())


def test_a_place_finds_its_entries():
    blocks = [block(0, 4, 10), block(1, 2, 20, bias=True), block(0, 4, 0)]
    table = block_table(blocks, 4, 2, 1, 8, DIMS, torch.float16)
    assert len(table.kinds) == 1
    assert table.tiles == 5
    rows = table.table.tolist()
    segments = 4 * PLACE_FIELDS
    for place in range(4):
        first, last, tiles = rows[place * PLACE_FIELDS : (place + 1) * PLACE_FIELDS]
        wanted = [one for one in blocks if one.first <= place < one.last and one.k.shape[1]]
        assert last - first == len(wanted)
        assert tiles == sum(-(-one.k.shape[1] // 8) for one in wanted)
        for segment, one in zip(range(first, last), wanted):
            row = rows[segments + segment * FIELDS : segments + (segment + 1) * FIELDS]
            at, own = place - row[7], place - one.first
            count = row[6]
            assert torch.equal(read(one.k[own], table.k[0], row[0] + at * row[1], 16 * count), one.k[own].flatten())
            assert torch.equal(read(one.v[own], table.v[0], row[2] + at * row[3], 16 * count), one.v[own].flatten())
            assert torch.equal(read(one.positions, table.positions, row[4] + at * row[5], count), one.positions[own])
            assert row[12] == (one.bias is not None)
            if one.bias is not None:
                for head in range(2):
                    offset = row[13] + at * row[14] + head * row[15]
                    assert torch.equal(read(one.bias, table.bias, offset, count), one.bias[own, head, 0])


def test_blocks_are_not_copied():
    blocks = [block(0, 2, 10), block(0, 2, 7)]
    held = {x.data_ptr() for x in block_table(blocks, 2, 1, 1, 16, DIMS, torch.float16).held}
    assert {x.data_ptr() for one in blocks for x in (one.k, one.v, one.positions)} <= held


def test_blocks_of_two_kinds_are_read_as_they_are():
    means = block(0, 2, 5, dtype=torch.float32)
    two = block_table([block(0, 2, 9), means], 2, 1, 1, 16, DIMS, torch.float16)
    assert [x.dtype for x in two.k] == [torch.float16, torch.float32]
    assert two.k[1].data_ptr() == means.k.data_ptr()
    packed = coded(0, 2, 5, 8, 4)
    table = block_table([block(0, 2, 9), packed], 2, 1, 1, 16, DIMS, torch.float16)
    assert table.kinds[1] == (torch.uint8, torch.uint8, 8, 4)
    assert table.alignment == (16, 1)  # 8 bytes a value
    row = table.table.tolist()[2 * 2 * PLACE_FIELDS + FIELDS :]
    for place in range(2):
        for scale, offset, stride in ((packed.k_scale, *row[8:10]), (packed.v_scale, *row[10:12])):
            assert torch.equal(read(scale, table.scale, offset + place * stride, 5), scale[place].flatten())


def test_of_more_kinds_all_but_the_first_become_plain():
    means = coded(0, 2, 5, 8, 4)
    table = block_table([block(0, 2, 9), means, coded(0, 2, 7, 4, 4)], 2, 1, 1, 16, DIMS, torch.float32)
    assert table.kinds == ((torch.float16, torch.float16, 0, 0), (torch.float32, torch.float32, 0, 0))
    assert table.scale is None
    wanted = dequantize(Quantized(means.v, means.v_scale, 4, 16))
    assert torch.equal(table.v[1], wanted)


def test_vectors_are_read_where_offsets_allow_it():
    odd = Block(0, torch.randn(2, 9, 15), torch.randn(2, 9, 15), torch.zeros(1, 9, dtype=torch.int32))
    assert block_table([odd], 2, 1, 1, 16, (15, 15), torch.float32).alignment == (1,)
    even = Block(0, torch.randn(2, 9, 16), torch.randn(2, 9, 16), torch.zeros(1, 9, dtype=torch.int32))
    assert block_table([even], 2, 1, 1, 16, DIMS, torch.float32).alignment == (16,)


def test_entries_that_are_not_dense_are_copied():
    wide = torch.randn(2, 9, 32)
    one = Block(0, wide[..., ::2], wide[..., 1::2], torch.zeros(1, 9, dtype=torch.int32))
    table = block_table([one], 2, 1, 1, 16, DIMS, torch.float32)
    assert torch.equal(read(table.k[0][1], table.k[0], table.k[0].stride(0), 16), one.k[1, 0])
