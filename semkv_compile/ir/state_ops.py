"""Schemas and fake implementations of the operators on a memory's tensors; `semkv.kernels.state` brings the real ones.

B rows of a batch, H KV heads, R rows of queries of a KV head (its group's query heads, T tokens of each: row g * T + t), D and Dv numbers
of a key and a value. W places of a window, C slots, M units of which row b has the first `count[b]`, N places where folded tokens wait.
What is written is written in place; sizes never depend on data, and nothing is asked of the host.
"""

from __future__ import annotations

import torch

from semkv.ir.ops import library

EMPTY = torch.iinfo(torch.int32).max
"""Position of a place that holds nothing: after every query, so that the causal rule hides it."""

library.define(
    # Token t of row b goes to place (at[b] + t) % W of its window. k [B, H, W, D], v [B, H, W, Dv], positions int32 [B, 1, W];
    # new_k [B, H, T, D], new_v [B, H, T, Dv], new_positions int64 [B, T], at int64 [B]; T <= W. With scales float16 [B, H, W, 1], k and v
    # are codes of 8 or 4 bits, made as `semkv.runtime.store.quantization.quantize` makes them.
    "append_(Tensor(a!) k, Tensor(b!) v, Tensor(c!) positions, Tensor new_k, Tensor new_v, Tensor new_positions, Tensor at, "
    "Tensor(d!)? k_scale=None, Tensor(e!)? v_scale=None) -> ()"
)
library.define(
    # Products of queries float32 [B, H, R, D] with vectors: numbers x [B, H, M, D], or codes uint8 [B, H, M, ceil(D * bits / 8)] of 4 or
    # 8 bits with a scale float16 [B, H, M, 1] -> float32 [B, H, R, M].
    "products(Tensor q, Tensor x, Tensor? scale=None, int bits=16) -> Tensor"
)
library.define(
    # Sums of what codes uint8 [B, H, M, S] find in tables float32 [B, H, R, S, 256], stage after stage -> float32 [B, H, R, M].
    "look_up(Tensor tables, Tensor codes) -> Tensor"
)
library.define(
    # Log-softmax of logits float32 [B, H, R, M] over the first count[b] (int64 [B]), -inf behind them, and the logarithm of the sum of
    # their exponentials [B, H, R, 1], -inf where there are none.
    "scores(Tensor logits, Tensor count) -> (Tensor, Tensor)"
)
library.define(
    # The units that each KV head unfolds, bool [B, H, M]: of the first count[b], those whose best score float32 [B, H, R, M] over the rows
    # that want them is highest (equal ones by index), as long as their costs add up to room[b] at most: the longest run in that order. A
    # row wants what is above -inf, and above its threshold float32 [H, R] where there are some. count, room int64 [B]; cost int32
    # [B, H|1, M], 1 each where it is None.
    "choose(Tensor score, Tensor count, Tensor room, Tensor? threshold=None, Tensor? cost=None) -> Tensor"
)
library.define(
    # `choose`, and which of the chosen units each row wants, bool [B, H, R, M].
    "choose_each(Tensor score, Tensor count, Tensor room, Tensor? threshold=None, Tensor? cost=None) -> (Tensor, Tensor)"
)
library.define(
    # Have the slots hold exactly the tokens of the units chosen bool [B, H, M], each head its own. Those that are there stay where they
    # are; the others take free slots, in the order of slots and of units (and of a unit's tokens), and are copied from where they wait:
    # host_k [B, H, N, D], host_v [B, H, N, Dv], in the dtype of k and v, or codes of 8 bits with scales float16 [B, H, N, 1], which are
    # copied as they are where the slots have scales too, and become numbers where not. There are always as many slots as are chosen.
    # k [B, H, C, D], v [B, H, C, Dv], positions int32 [B, H, C], EMPTY where a slot holds nothing, slots int32 [B, H, C]: the place that
    # each slot's token waits at, -1 where none. What stands in an empty slot is finite.
    # The tokens of unit u wait at order[bounds[u]] to order[bounds[u + 1] - 1], bounds int32 [B, H|1, M + 1], order int32 [B, H|1, N]; at
    # bounds[u] and so on where order is None; and where bounds is None too, at start[b] + u * length and so on, `length` of them.
    # The token at place p has position where[b, p] (int32 [B, N]), or p + shift[b]. start, shift int64 [B].
    # -> int64 [B, 2]: tokens that were copied and tokens that were there, over all heads.
    "unfold_(Tensor(a!) k, Tensor(b!) v, Tensor(c!) positions, Tensor(d!) slots, Tensor chosen, Tensor host_k, Tensor host_v, "
    "Tensor start, Tensor shift, int length, Tensor(e!)? k_scale=None, Tensor(f!)? v_scale=None, Tensor? host_k_scale=None, "
    "Tensor? host_v_scale=None, Tensor? bounds=None, Tensor? order=None, Tensor? where=None) -> Tensor"
)
library.define(
    # Attention of each row of queries to all units that it does not read unfolded, known by codes of their values: score float32
    # [B, H, R, M] is a logit but for shift [B, H, R, 1], which is added; then the soft-cap, where there is one. chosen bool [B, H, M] are
    # read unfolded, or own bool [B, H, R, M] where rows differ; units beyond count[b] do not exist. codes uint8 [B, H, M, S], books float32
    # [H, S, 256, Dv], mean float32 [H, Dv]: a unit's value is the mean and one vector of each stage's book.
    # -> the value float32 [B, H, R, Dv], zeros where nothing is left, and the logarithm of its mass [B, H, R], -inf there.
    "coarse_attention(Tensor score, Tensor shift, Tensor chosen, Tensor count, Tensor codes, Tensor books, Tensor mean, "
    "float softcap=0.0, Tensor? own=None) -> (Tensor, Tensor)"
)
library.define(
    # Attention of rows of queries float32 [B, H, R, D], at the position asked int64 [B], to the spans that wait as low-rank factors: those
    # of the units chosen bool [B, H, M], or own bool [B, H, R, M] (some of them) where rows differ. F spans, of at most `longest` tokens
    # and ranks up to `rank`. where int64 [B, H, F, 3]: the place in data [B, n] of the first number that a head has of a span, and the
    # ranks r of its keys and values: U [length, r], s [r] and V [D, r] of keys lie there, then those of values, whose V is [Dv, r]; keys
    # are (U * s) V^T. spans int64 [B, F, 2]: length, and position of the first token; unit int64 [B, H|1, F]: whose it is, -1: nobody's.
    # A query sees positions up to its own, and where `window` is not 0, only the last `window` of them. Logits are times `scale`, then
    # soft-capped where there is a cap. held bool [B, H, F]: the spans that the step before has read, which is put down for this one.
    # -> the value float32 [B, H, R, Dv], zeros where nothing is read; the logarithm of its mass [B, H, R], -inf there; and bytes of
    # factors that are read and were not held, and of those that were, int64 [B, 2], over all heads.
    "factored_attention_(Tensor q, Tensor chosen, Tensor(a!) held, Tensor data, Tensor where, Tensor spans, Tensor unit, Tensor asked, "
    "int value_dim, int longest, int rank, float scale, float softcap=0.0, int window=0, Tensor? own=None) -> (Tensor, Tensor, Tensor)"
)


@torch.library.register_fake("semkv::append_", lib=library)
def _append_fake(k, v, positions, new_k, new_v, new_positions, at, k_scale=None, v_scale=None):
    return None


@torch.library.register_fake("semkv::products", lib=library)
def _products_fake(q, x, scale=None, bits=16):
    return q.new_empty((*q.shape[:3], x.shape[2]))


@torch.library.register_fake("semkv::look_up", lib=library)
def _look_up_fake(tables, codes):
    return tables.new_empty((*tables.shape[:3], codes.shape[2]))


@torch.library.register_fake("semkv::scores", lib=library)
def _scores_fake(logits, count):
    return torch.empty_like(logits), logits.new_empty((*logits.shape[:3], 1))


@torch.library.register_fake("semkv::choose", lib=library)
def _choose_fake(score, count, room, threshold=None, cost=None):
    rows, heads, _, units = score.shape
    return score.new_empty((rows, heads, units), dtype=torch.bool)


@torch.library.register_fake("semkv::choose_each", lib=library)
def _choose_each_fake(score, count, room, threshold=None, cost=None):
    return _choose_fake(score, count, room), score.new_empty(score.shape, dtype=torch.bool)


@torch.library.register_fake("semkv::unfold_", lib=library)
def _unfold_fake(k, v, positions, slots, chosen, host_k, host_v, start, shift, length, *rest, **kwargs):
    return start.new_empty((len(start), 2))


@torch.library.register_fake("semkv::coarse_attention", lib=library)
def _coarse_attention_fake(score, shift, chosen, count, codes, books, mean, softcap=0.0, own=None):
    return score.new_empty((*score.shape[:3], books.shape[-1])), score.new_empty(score.shape[:3])


@torch.library.register_fake("semkv::factored_attention_", lib=library)
def _factored_attention_fake(q, chosen, held, data, where, spans, unit, asked, value_dim, *rest, **kwargs):
    told = asked.new_empty((len(asked), 2))
    return q.new_empty((*q.shape[:3], value_dim)), q.new_empty(q.shape[:3]), told


append_ = torch.ops.semkv.append_.default
products = torch.ops.semkv.products.default
look_up = torch.ops.semkv.look_up.default
scores = torch.ops.semkv.scores.default
choose = torch.ops.semkv.choose.default
choose_each = torch.ops.semkv.choose_each.default
unfold_ = torch.ops.semkv.unfold_.default
coarse_attention = torch.ops.semkv.coarse_attention.default
factored_attention_ = torch.ops.semkv.factored_attention_.default
