"""Modules whose code branches on values and that treat each token by itself: what is proven of them, and their graphs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import semkv
from semkv.capture.local_modules import COPIES, find_local, prove_local, trace_local
from semkv.capture.value_branches import EveryPlace
from semkv.errors import ArtifactError, CaptureError
from semkv.ir.recurrence import Live
from semkv.model.huggingface import CACHE
from tests.hybrids import Alone, difference

WIDTH, EXPERTS, VOCAB, HEADS = 32, 5, 61, 4
PLAIN = semkv.CompileConfig(kernels="torch", floor=0)


class Experts(nn.Module):
    """A loop over the experts that some token chose, as most are written."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) * WIDTH**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) * (2 * WIDTH) ** -0.5)

    def compute(self, x: Tensor, expert: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(x, self.up[expert])), self.down[expert])

    def choose(self, chosen: Tensor, expert: Tensor) -> tuple[Tensor, Tensor]:
        return torch.where(chosen[expert])

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        flat, out = x.reshape(-1, WIDTH), torch.zeros_like(x).reshape(-1, WIDTH)
        chosen = F.one_hot(index, EXPERTS + 1).permute(2, 1, 0)  # a place more than there are experts
        for expert in (chosen.sum((-1, -2)) > 0).nonzero():
            place, token = self.choose(chosen, expert[0])
            if token.numel() == 0:
                continue
            out.index_add_(0, token, self.compute(flat[token], expert[0]) * weights[token, place, None])
        return out.reshape(x.shape)


class Limited(Experts):
    """Each expert takes the first tokens alone that choose it."""

    limit = 40

    def choose(self, chosen: Tensor, expert: Tensor) -> tuple[Tensor, Tensor]:
        place, token = torch.where(chosen[expert])
        return place[: self.limit], token[: self.limit]


class NeverFull(Limited):
    """A limit that a text as short as that of the proof does not reach: only copies of a token do."""

    limit = 300


class Mixing(Experts):
    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return super().forward(x, index, weights) + 1e-3 * x.mean((0, 1))


class Ordered(Experts):
    """A token's weight depends on how many came before it."""

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return super().forward(x, index, weights * torch.linspace(1, 1.01, len(weights))[:, None])


class Random(Experts):
    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return super().forward(x, index, weights) * (1 + 1e-3 * torch.rand(()))


class Listing(Experts):
    """Numbers of tokens as a list, which no graph has."""

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x).reshape(-1, WIDTH)
        for expert, count in enumerate(torch.bincount(index.flatten(), minlength=EXPERTS).tolist()):
            if count:
                place, token = torch.where((index == expert).T)
                out.index_add_(
                    0, token, self.compute(x.reshape(-1, WIDTH)[token], expert) * weights[token, place, None]
                )
        return out.reshape(x.shape)


class Layer(nn.Module):
    def __init__(self, experts: type[Experts]) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.route, self.experts = nn.Linear(WIDTH, EXPERTS), experts()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, 3 * k, v, is_causal=True).transpose(1, 2).flatten(2))
        weights, index = self.route(x).flatten(0, 1).softmax(-1).topk(2)
        return x + self.experts(x, index, weights)


class Decoder(nn.Module):
    """A decoder of two layers with experts, and nothing of any model library."""

    def __init__(self, experts: type[Experts]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList([Layer(experts), Layer(experts)])

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def decoder(experts: type[Experts]) -> Decoder:
    return Decoder(experts).eval()


def found(model: Decoder):
    with torch.no_grad():
        return find_local(model, lambda ids, positions: model(ids), model.layers[0].experts, [])


def prove(model: Decoder) -> None:
    for site, tokens in found(model):
        prove_local(site, tokens)


@pytest.fixture(scope="module")
def compiled():
    """`compiled(experts)`: a decoder and what was compiled of it, once."""
    known: dict[type, tuple[Decoder, semkv.CompiledModel]] = {}

    def make(experts: type[Experts] = Experts) -> tuple[Decoder, semkv.CompiledModel]:
        if experts not in known:
            model = decoder(experts)
            known[experts] = model, semkv.compile(model, method="full", config=PLAIN)
        return known[experts]

    return make


def text(length: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCAB, (1, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def greedy(model: Decoder, ids: Tensor, count: int) -> list[int]:
    made = []
    for _ in range(count):
        made.append(int(model(ids)[0, -1].argmax()))
        ids = torch.cat([ids, torch.tensor([[made[-1]]])], 1)
    return made


# -- the proof ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_experts_are_proven_and_their_graph_computes_the_same():
    (first, tokens), (second, _) = found(decoder(Experts))
    assert (first.name, second.name) == ("layers.0.experts", "layers.1.experts")
    assert (first.taken, first.given) == (("rows", "tokens", "tokens"), ("rows",))
    prove_local(first, tokens)
    pieces = trace_local(first, tokens)
    assert not isinstance(pieces, Live)
    targets = {str(node.target) for node in pieces.graphs[1].graph.nodes}
    assert "aten.nonzero.default" in targets
    assert not any("assert" in target for target in targets)
    for count in (1, 2, 7):
        given = [x[:count] for x in tokens]
        (mine,), _ = pieces(given, None, list(first.weights.values()))
        assert difference(mine, first.run(given, None)[0][0]) < 1e-5


@pytest.mark.parametrize(
    ("experts", "shows"),
    [
        (Limited, "in another order"),
        (NeverFull, f"a token among {COPIES} copies of itself"),
        (Mixing, "its tokens as rows of one token each|in another order|first half"),
        (Ordered, "in another order"),
    ],
)
@torch.no_grad()
def test_what_mixes_tokens_is_refused(experts, shows):
    with pytest.raises(CaptureError, match=rf"layers.0.experts \({experts.__name__}\) .*({shows})"):
        prove(decoder(experts))


@torch.no_grad()
def test_what_draws_numbers_is_refused():
    with pytest.raises(CaptureError, match="Random"):
        prove(decoder(Random))


def test_a_model_that_drops_tokens_is_refused_with_the_reason():
    with pytest.raises(CaptureError, match="does not treat each token by itself"):
        semkv.compile(decoder(NeverFull), method="full", config=PLAIN)


def test_every_place_is_found_where_sizes_are_no_tokens():
    with EveryPlace(without=[1]) as branches:
        places = [int(place[0]) for place in torch.zeros(4).nonzero()]
        rows = torch.arange(8).reshape(4, 2)[torch.zeros(4).nonzero()[2, 0]]
        several = torch.eye(3).nonzero()  # of two axes: what it is
    assert places == [0, 2, 3]
    assert branches.place == 3
    assert rows.tolist() == [6, 7]
    assert several.tolist() == [[0, 0], [1, 1], [2, 2]]


# -- programs ----------------------------------------------------------------------------------------------------------


def test_ragged_rows_turns_and_forks_are_the_models(compiled):
    model, mine = compiled()
    assert [site.name for site in mine.program.recurrences] == ["layers.0.experts", "layers.1.experts"]
    assert not mine.program.stateful
    rows = [text(length, length) for length in (90, 41, 2)]
    batch = torch.cat([F.pad(row, (90 - row.shape[1], 0)) for row in rows])
    mask = torch.cat([F.pad(torch.ones_like(row), (90 - row.shape[1], 0)) for row in rows])
    result = mine.generate(
        batch, attention_mask=mask, max_new_tokens=8, do_sample=False, return_dict_in_generate=True, pad_token_id=0
    )
    wanted = [greedy(model, row, 8) for row in rows]
    assert result.sequences[:, -8:].tolist() == wanted
    more = torch.cat([text(5, seed) for seed in range(3)])
    said = [
        torch.cat([row, torch.tensor([answer]), more[i : i + 1]], 1)
        for i, (row, answer) in enumerate(zip(rows, wanted))
    ]
    again = mine.generate(more, max_new_tokens=6, do_sample=False, state=result[CACHE], pad_token_id=0)
    assert again[:, -6:].tolist() == [greedy(model, row, 6) for row in said]
    state = mine.prefill(rows[0])
    fork = state.fork()
    mine.extend(state, text(20, 2))
    with torch.no_grad():
        theirs = model(torch.cat([rows[0], text(9, 3)], 1))[:, -1]
    assert difference(mine.extend(fork, text(9, 3))[:, -1], theirs) < 1e-4


@pytest.mark.parametrize("method", ["snapkv", "quest"])
def test_methods_hold_their_budget(method):
    mine = semkv.compile(decoder(Experts), method=method, budget=0.5, config=PLAIN)
    state = mine.prefill(text(400))
    for token in text(20, 1)[0]:
        mine.extend(state, token[None, None])
    assert 0.2 < state.stats.device_share <= 0.5
    assert state.stats.attended_share <= 0.5


def test_an_artifact_needs_no_modelling_code(compiled, tmp_path):
    _, mine = compiled()
    mine.save(tmp_path / "artifact")
    loaded = semkv.load(tmp_path / "artifact")
    assert loaded.fingerprint == mine.fingerprint
    ids = text(60, 5)
    assert torch.equal(
        loaded.generate(ids, max_new_tokens=8, do_sample=False), mine.generate(ids, max_new_tokens=8, do_sample=False)
    )


def test_code_that_has_no_graph_runs_live_and_cannot_be_saved(compiled, tmp_path):
    model, mine = compiled(Listing)
    ids = text(50, 7)
    assert mine.generate(ids, max_new_tokens=8, do_sample=False)[0, -8:].tolist() == greedy(model, ids, 8)
    with pytest.raises(
        ArtifactError, match=r"module layers.0.experts runs as the model's own code.*write that module with tensor"
    ):
        mine.save(tmp_path / "artifact")
    assert not (tmp_path / "artifact").exists()
    with pytest.raises(ArtifactError, match=r"module layers\.0\.experts runs as the model's own code"):
        mine.export(tmp_path / "step")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dbrx", "longcat_flash"])
def test_models_of_transformers(name):
    from benchmarks.lib.tiny_models import tiny_model

    model = tiny_model(name, dtype=torch.float32)
    mine = semkv.compile(model, method="full", config=PLAIN)
    alone = Alone(model)
    ids = torch.randint(5, 190, (1, 70), generator=torch.Generator().manual_seed(0))
    assert difference(mine.prefill(ids).logits, alone.read(ids)[:, -1]) < 1e-4
