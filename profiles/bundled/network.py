"""A lean Llama forward for training, its structured initialisation, and its export to the Hugging Face layout.

Parameters are a flat dict under their Llama names, so export is a cast and a save. Matrices run in bf16 (fast on
recent CPUs and GPUs), the residual stream and the norms in fp32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from .tokenizer import BOS, EOS, MAX_LENGTH, PAD, build_tokenizer, vocabulary_ids


@dataclass(frozen=True)
class Shape:
    """Sizes of the network; ``theta`` is RoPE's base."""

    layers: int = 4
    hidden: int = 192
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    mlp: int = 384
    theta: float = 1e7
    eps: float = 1e-5
    vocab: int = len(vocabulary_ids())


Params = dict[str, Tensor]


def random_init(shape: Shape, seed: int) -> Params:
    """Normal weights (std 0.02, less for what writes to the residual stream), norms of one."""
    rng = torch.Generator(device="cpu").manual_seed(seed)

    def normal(rows: int, columns: int, std: float = 0.02) -> Tensor:
        return torch.randn(rows, columns, generator=rng, dtype=torch.float32, device="cpu") * std

    d, q, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    out = 0.02 / math.sqrt(2 * shape.layers)
    params = {"model.embed_tokens.weight": normal(shape.vocab, d)}
    for i in range(shape.layers):
        p = f"model.layers.{i}."
        params[p + "input_layernorm.weight"] = torch.ones(d, dtype=torch.float32, device="cpu")
        params[p + "self_attn.q_proj.weight"] = normal(q, d)
        params[p + "self_attn.k_proj.weight"] = normal(kv, d)
        params[p + "self_attn.v_proj.weight"] = normal(kv, d)
        params[p + "self_attn.o_proj.weight"] = normal(d, q, out)
        params[p + "post_attention_layernorm.weight"] = torch.ones(d, dtype=torch.float32, device="cpu")
        params[p + "mlp.gate_proj.weight"] = normal(shape.mlp, d, 0.05)
        params[p + "mlp.up_proj.weight"] = normal(shape.mlp, d, 0.05)
        params[p + "mlp.down_proj.weight"] = normal(d, shape.mlp, out)
    params["model.norm.weight"] = torch.ones(d, dtype=torch.float32, device="cpu")
    params["lm_head.weight"] = normal(shape.vocab, d)
    return params


OFFSETS = 6
"""Layer 0 starts with heads that copy a code of the token 1 .. OFFSETS places back."""
CODE = 20
"""Residual dimensions of one such code."""
# What a matching head compares: offset of the query's code -> offset of the key's code (0 is the token itself). The
# first says "what follows the same words"; the others the same with one or two more words between key and answer in
# the question.
_SHIFT_NEXT = {0: 1, 1: 2, 2: 3, 3: 4, 4: 5}
_SHIFT_ONE_APART = {0: 1, 3: 2, 4: 3, 5: 4}
_SHIFT_TWO_APART = {0: 1, 4: 2, 5: 3, 6: 4}


def structured_init(shape: Shape, seed: int) -> Params:
    """A start from which retrieval is learned in minutes; everything is trained from there.

    Residual dimensions: 0 holds a constant, 1 .. 71 the token, then OFFSETS codes of CODE dimensions each. Layer 0's
    heads look a fixed number of places back (by RoPE's fast pairs) and write the code of what they see. The heads of
    layers 1 and 2 match these codes between query and key in RoPE's slow pairs, which hardly turn within 8K tokens,
    and write the matched token's output direction. The last layer starts at random.
    """
    params = random_init(shape, seed)
    rng = torch.Generator(device="cpu").manual_seed(seed + 1)
    d, hd, group = shape.hidden, shape.head_dim, shape.heads // shape.kv_heads
    half, content, scale = hd // 2, d - OFFSETS * CODE, 0.3

    def orthonormal(rows: int, columns: int) -> Tensor:
        long, short = max(rows, columns), min(rows, columns)
        basis = torch.linalg.qr(torch.randn(long, short, generator=rng, dtype=torch.float32, device="cpu")).Q
        return basis if rows >= columns else basis.T

    token = slice(1, content)
    embed = torch.randn(shape.vocab, d, generator=rng, dtype=torch.float32, device="cpu") * 0.01
    embed[:, token] = torch.randn(shape.vocab, content - 1, generator=rng, dtype=torch.float32, device="cpu") * scale
    embed[:, 0] = 2 * scale
    params["model.embed_tokens.weight"] = embed
    rms = embed.pow(2).mean().sqrt().item()

    def code_dims(offset: int) -> slice:
        return slice(content + (offset - 1) * CODE, content + offset * CODE)

    frequency = 1.0 / shape.theta ** (torch.arange(half, dtype=torch.int64, device="cpu") / half)
    code = orthonormal(CODE, content - 1)
    first = "model.layers.0.self_attn."
    q, k, v, o = (params[f"{first}{name}_proj.weight"] for name in "qkvo")
    fast, constant = 8, 2 * scale / rms
    for g in range(shape.kv_heads):
        k[g * hd : g * hd + fast, 0] = 8 / constant
        v[g * hd : g * hd + CODE, token] = code
    for h in range(min(OFFSETS, shape.heads)):
        turn = (h + 1) * frequency[:fast]
        q[h * hd : h * hd + fast, 0] = 8 / constant * turn.cos()
        q[h * hd + half : h * hd + half + fast, 0] = -8 / constant * turn.sin()
        o[code_dims(h + 1), h * hd : h * hd + CODE] = rms * torch.eye(CODE, dtype=torch.float32, device="cpu")

    slow = torch.cat(
        [
            torch.arange(half * 17 // 32, half, dtype=torch.int64, device="cpu"),
            torch.arange(half + half * 17 // 32, hd, dtype=torch.int64, device="cpu"),
        ]
    )
    to_output = orthonormal(d, content - 1)
    params["lm_head.weight"] += 0.1 * embed[:, token] / scale @ to_output.T
    for i in (1, 2):
        q, k, v, o = (params[f"model.layers.{i}.self_attn.{name}_proj.weight"] for name in "qkvo")
        for g in range(shape.kv_heads):
            mix = torch.randn(OFFSETS + 1, len(slow), CODE, generator=rng, dtype=torch.float32, device="cpu") * (
                1.4 / math.sqrt(len(slow))
            )
            for offset in range(1, OFFSETS):
                k[g * hd + slow, code_dims(offset)] += mix[offset]
            values = orthonormal(min(hd, content - 1), content - 1)
            v[g * hd : g * hd + len(values), token] += values
            for r in range(group):
                h = g * group + r
                shift = _SHIFT_NEXT if r == 0 else (_SHIFT_ONE_APART, _SHIFT_TWO_APART)[g % 2]
                for at, to in shift.items():
                    if at:
                        q[h * hd + slow, code_dims(at)] += mix[to]
                    else:
                        q[h * hd + slow, token] += mix[to] @ code
                o[:, h * hd : h * hd + len(values)] += 0.6 * scale / 2 * to_output @ values.T
    return params


def rope_tables(positions: Tensor, shape: Shape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of shape [B, T, 1, head_dim / 2] for ``positions`` [B, T]."""
    half = shape.head_dim // 2
    frequency = 1.0 / shape.theta ** (torch.arange(half, dtype=torch.float32, device=positions.device) / half)
    angle = positions[:, :, None, None].float() * frequency
    return angle.cos().to(dtype), angle.sin().to(dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def forward(
    params: Params, shape: Shape, ids: Tensor, positions: Tensor, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Logits [B, T, vocab] in ``dtype`` for ids and positions [B, T], causal over the order of the tokens."""
    b, t = ids.shape
    cos, sin = rope_tables(positions, shape, dtype)
    x = F.embedding(ids, params["model.embed_tokens.weight"])

    def norm(name: str) -> Tensor:
        return F.rms_norm(x, (shape.hidden,), params[name], shape.eps).to(dtype)

    def weight(*names: str) -> Tensor:
        return torch.cat([params[name] for name in names]).to(dtype) if len(names) > 1 else params[names[0]].to(dtype)

    for i in range(shape.layers):
        p = f"model.layers.{i}."
        a = p + "self_attn."
        qkv = F.linear(
            norm(p + "input_layernorm.weight"), weight(a + "q_proj.weight", a + "k_proj.weight", a + "v_proj.weight")
        )
        qkv = qkv.view(b, t, -1, shape.head_dim)
        qk = _rotate(qkv[:, :, : shape.heads + shape.kv_heads], cos, sin)
        q, k = qk[:, :, : shape.heads], qk[:, :, shape.heads :]
        v = qkv[:, :, shape.heads + shape.kv_heads :]
        group = shape.heads // shape.kv_heads
        k, v = (y.repeat_interleave(group, dim=2) for y in (k, v))
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        x = x + F.linear(y.transpose(1, 2).reshape(b, t, -1), weight(a + "o_proj.weight"))
        gate, up = F.linear(
            norm(p + "post_attention_layernorm.weight"), weight(p + "mlp.gate_proj.weight", p + "mlp.up_proj.weight")
        ).chunk(2, dim=-1)
        x = x + F.linear(F.silu(gate) * up, weight(p + "mlp.down_proj.weight"))
    return F.linear(norm("model.norm.weight"), weight("lm_head.weight"))


def llama_config(shape: Shape) -> LlamaConfig:
    """The same network as a Hugging Face configuration."""
    return LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=MAX_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": shape.theta},
        rms_norm_eps=shape.eps,
        tie_word_embeddings=False,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )


def to_llama(params: Params, shape: Shape, dtype: torch.dtype = torch.float16) -> LlamaForCausalLM:
    """The Hugging Face model with these weights; raises when a name or a shape does not match."""
    model = LlamaForCausalLM(llama_config(shape))
    model.load_state_dict({name: p.detach() for name, p in params.items()})
    for p in model.parameters():  # and not RoPE's buffers, which stay exact
        p.data = p.data.to(dtype)
    model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD, do_sample=False)
    return model.eval()


def export(params: Params, shape: Shape, folder: Path) -> None:
    """Writes fp16 weights, configuration and tokenizer in the Hugging Face layout."""
    to_llama(params, shape).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
