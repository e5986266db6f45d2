"""Tokens that contend for their places in generation, against H2O's Alg. 1 written as loops."""

from __future__ import annotations

import math

import pytest
import torch

from semkv.errors import ArtifactError
from semkv.ir.site import AttentionSite
from semkv.methods import H2O
from semkv.methods.h2o import HeavyHitters
from semkv.runtime.components import Components
from semkv.runtime.step import Step
from semkv.runtime.store.site_memory import SiteMemory
from semkv.runtime.store.token_store import TokenStore
from semkv.runtime.text import Text

SITE = AttentionSite(index=0, name="layer", store=0, q_heads=4, kv_heads=2, key_dim=6, value_dim=3, scale=0.5)
COMPONENTS = Components(evictor=HeavyHitters(0.5), reads_queries=True)
TOKEN = 2 * (4 * (6 + 3) + 4 + 4)
"""Bytes of a token of both heads with its positions and scores."""


def empty(page: int) -> SiteMemory:
    def store() -> TokenStore:
        where = torch.zeros(1, 0, dtype=torch.int32)
        return TokenStore(torch.zeros(2, 0, 6), torch.zeros(2, 0, 3), where, page, scores=torch.zeros(2, 0))

    return SiteMemory(SITE, COMPONENTS, store(), store(), None, device=torch.device("cpu"))


class Loop:
    """Alg. 1 for one KV head: after every token, the lowest-scored token that is not recent leaves a full cache."""

    def __init__(self, budget: int) -> None:
        self.budget, self.window = budget, budget - budget // 2
        self.scores: dict[int, float] = {}

    def step(self, at: int, queries: torch.Tensor, keys: torch.Tensor) -> None:
        if len(self.scores) == self.budget:
            candidates = [token for token in self.scores if token < at - self.window + 1]
            del self.scores[min(candidates, key=lambda token: self.scores[token])]
        self.scores[at] = 0.0
        for query in queries:
            raw = {token: math.exp(float(query @ keys[token]) * SITE.scale) for token in self.scores}
            for token in raw:
                self.scores[token] += raw[token] / sum(raw.values()) / len(queries)


def run(memory: SiteMemory, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sizes: list[int], cap: float) -> None:
    start, text = 0, Text(torch.zeros(0, dtype=torch.int64))
    for size in sizes:
        new = slice(start, start + size)
        where = torch.arange(start, start + size)
        memory.append(k[:, new], v[:, new], where, text, cap, 0)
        memory.entries(SITE, q[:, new], 0.0, Step(where, start, SITE, q[:, new]))
        assert memory.fixed_nbytes <= cap
        start += size


def drawn(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(2 * torch.randn(heads, n, dim, generator=generator) for heads, dim in ((4, 6), (2, 6), (2, 3)))


@pytest.mark.parametrize(("budget", "n", "seed"), [(12, 60, 0), (9, 41, 1), (20, 19, 2)])
def test_one_token_at_a_time_is_h2os_algorithm(budget, n, seed):
    q, k, v = drawn(n, seed)
    memory = empty(1)
    run(memory, q, k, v, [1] * n, budget * TOKEN)
    for head in range(2):
        loop = Loop(budget)
        for at in range(n):
            loop.step(at, q[2 * head : 2 * head + 2, at], k[head])
        expected = dict(sorted(loop.scores.items()))
        positions = [*memory.kept.positions[min(head, len(memory.kept.positions) - 1)], *memory.recent.positions[0]]
        assert [int(place) for place in positions] == list(expected)
        got = torch.cat([memory.kept.scores[head], memory.recent.scores[head]])
        torch.testing.assert_close(got, torch.tensor(list(expected.values())), rtol=1e-4, atol=1e-5)
        assert torch.equal(memory.kept.k[head], k[head, positions[: memory.kept.length]])
    if n > budget:
        assert memory.recent.positions[0].tolist() == list(range(n - (budget - budget // 2), n))


@pytest.mark.parametrize("page", [1, 4, 8])
@pytest.mark.parametrize("sizes", [[1] * 90, [7] * 13, [16, 1, 1, 12, 3, 16, 16, 1, 16], [16] * 6])
def test_chunks_stay_within_the_cap_and_use_it(page, sizes):
    n = sum(sizes)
    q, k, v = drawn(n, 3)
    memory = empty(page)
    run(memory, q, k, v, sizes, 32 * TOKEN)
    assert memory.kept.length + memory.recent.length > 32 - page - max(sizes)
    assert memory.recent.positions[0, -1] == n - 1
    positions = memory.kept.positions
    assert bool((positions.diff(dim=1) > 0).all())
    assert int(positions.max()) < int(memory.recent.positions[0, 0])


def test_heads_keep_different_tokens_and_a_clone_its_own():
    q, k, v = drawn(80, 4)
    memory = empty(8)
    run(memory, q[:, :60], k[:, :60], v[:, :60], [1] * 60, 32 * TOKEN)
    assert memory.kept.positions[0].tolist() != memory.kept.positions[1].tolist()
    copy = memory.clone()
    before = memory.kept.scores.clone()
    where = torch.tensor([60])
    copy.append(k[:, 60:61], v[:, 60:61], where, Text(where[:0]), 32 * TOKEN, 0)
    copy.entries(SITE, q[:, 60:61], 0.0, Step(where, 60, SITE, q[:, 60:61]))
    assert torch.equal(memory.kept.scores, before)
    assert not torch.equal(copy.recent.scores[:, :-1].sum(), memory.recent.scores.sum())


def test_the_prompts_scores_are_those_of_the_first_tokens(double_program, compile_as, prompt):
    """Half of the room for the highest, half for the newest."""
    compiled = compile_as(double_program, "h2o", 40, kv_dtype="float64")
    record = compiled.prefill_record(prompt(120))
    memory = compiled.compress(record).rows[0].stores[0][0]
    scores = H2O().components(compiled.program, None).evictor.scores(memory.site, record)
    recent = 120 - memory.recent.length
    expected = scores[:, :recent].topk(memory.kept.length).indices.sort().values
    assert torch.equal(memory.kept.positions.long(), expected)
    assert torch.equal(memory.kept.scores, scores.gather(1, expected))
    assert torch.equal(memory.recent.scores, scores[:, recent:])
    assert 0 <= memory.recent.length - memory.kept.length <= 8


def test_a_saved_score_that_is_no_score_is_refused(double_program, compile_as, prompt, tmp_path):
    compiled = compile_as(double_program, "h2o", 40)
    state = compiled.prefill(prompt(90))
    state.rows[0].stores[0][0].kept.scores[0, 0] = float("nan")
    state.save(tmp_path / "s")
    with pytest.raises(
        ArtifactError, match=r"kept\.scores are no accumulated weights: some are negative or not finite"
    ):
        compiled.load_state(tmp_path / "s")
