"""Triton templates of surprisal: logits tile by tile in registers, one running maximum and sum per token, splits of the vocabulary."""

from __future__ import annotations

import triton
import triton.language as tl

from semkv.kernels.elementwise import tanh


@triton.jit
def vocabulary_partials(
    p_hidden,
    p_weight,
    p_bias,
    p_target,
    p_logit,
    p_top,
    p_mass,
    tokens,
    vocabulary,
    softcap,
    HIDDEN: tl.constexpr,
    BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_VOCABULARY: tl.constexpr,
    BLOCK_HIDDEN: tl.constexpr,
):
    """Grid (blocks of tokens, SPLITS): hidden [n, H], weight [V, H] -> the target's logit float32 [n] (the split that has it
    writes it), and per split the maximum and sum of exponentials float32 [SPLITS, n]."""
    o_token = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    live = o_token < tokens
    target = tl.load(p_target + o_token, mask=live, other=-1)
    tiles = tl.cdiv(vocabulary, BLOCK_VOCABULARY)
    per_split = tl.cdiv(tiles, SPLITS)
    first = tl.program_id(1) * per_split
    top = tl.full([BLOCK_TOKENS], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_TOKENS], tl.float32)
    for tile in range(first, tl.minimum(first + per_split, tiles)):
        o_word = tile * BLOCK_VOCABULARY + tl.arange(0, BLOCK_VOCABULARY)
        there = o_word < vocabulary
        logits = tl.zeros([BLOCK_TOKENS, BLOCK_VOCABULARY], tl.float32)
        for start in range(0, HIDDEN, BLOCK_HIDDEN):
            o_hidden = start + tl.arange(0, BLOCK_HIDDEN)
            inside = o_hidden < HIDDEN
            b_hidden = tl.load(
                p_hidden + o_token.to(tl.int64)[:, None] * HIDDEN + o_hidden[None, :],
                mask=live[:, None] & inside[None, :],
                other=0.0,
            )
            b_weight = tl.load(
                p_weight + o_word.to(tl.int64)[None, :] * HIDDEN + o_hidden[:, None],
                mask=there[None, :] & inside[:, None],
                other=0.0,
            )
            logits = tl.dot(b_hidden, b_weight.to(b_hidden.dtype), logits, input_precision="ieee")
        if BIAS:
            logits += tl.load(p_bias + o_word, mask=there, other=0.0).to(tl.float32)[None, :]
        if SOFTCAP:
            logits = softcap * tanh(logits / softcap)
        own = target[:, None] == o_word[None, :]
        found = tl.sum(tl.where(own, logits, 0.0), 1)
        in_tile = (target >= tile * BLOCK_VOCABULARY) & (target < tile * BLOCK_VOCABULARY + BLOCK_VOCABULARY)
        tl.store(p_logit + o_token, found, mask=live & in_tile)
        logits = tl.where(there[None, :], logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        mass = mass * tl.exp(top - new_top) + tl.sum(tl.exp(logits - new_top[:, None]), 1)
        top = new_top
    tl.store(p_top + tl.program_id(1) * tokens + o_token, top, mask=live)
    tl.store(p_mass + tl.program_id(1) * tokens + o_token, mass, mask=live)


@triton.jit
def merge_vocabulary(p_logit, p_top, p_mass, p_out, tokens, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (blocks of tokens): log of the sum over splits [SPLITS, n], less the target's logit, float32 [n]."""
    o_token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = o_token < tokens
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    for split in range(SPLITS):
        highest = tl.maximum(highest, tl.load(p_top + split * tokens + o_token, mask=live, other=0.0))
    mass = tl.zeros([BLOCK], tl.float32)
    for split in range(SPLITS):
        top = tl.load(p_top + split * tokens + o_token, mask=live, other=0.0)
        mass += tl.load(p_mass + split * tokens + o_token, mask=live, other=1.0) * tl.exp(top - highest)
    logit = tl.load(p_logit + o_token, mask=live, other=0.0)
    tl.store(p_out + o_token, highest - logit + tl.log(mass), mask=live)
