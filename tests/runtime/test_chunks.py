"""Attention within chunks: a token sees its own run of positions, beside layers that see all."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import semkv
from semkv.errors import ConfigError
from semkv.ir.choices import chunk_bias
from semkv.ir.memory import Entries, read_chunk
from semkv.model.huggingface import CACHE
from tests.hybrids import difference

WIDTH, HEADS, VOCAB, CHUNK = 32, 4, 61, 24
PLAIN = semkv.CompileConfig(kernels="torch", floor=0)


class Layer(nn.Module):
    def __init__(self, chunk: int) -> None:
        super().__init__()
        self.qkv, self.out, self.chunk = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), chunk

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        place = torch.arange(x.shape[1], device=x.device)
        mask = place[:, None] >= place
        if self.chunk:
            mask = mask & (place[:, None] // self.chunk == place // self.chunk)
        made = F.scaled_dot_product_attention(2 * q, 2 * k, v, mask)
        return x + self.out(made.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList([Layer(CHUNK), Layer(0)])

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def ids(length: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCAB, (1, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def greedy(model: nn.Module, text: Tensor, count: int) -> list[int]:
    made = []
    for _ in range(count):
        made.append(int(model(text)[0, -1].argmax()))
        text = torch.cat([text, torch.tensor([[made[-1]]])], 1)
    return made


@pytest.fixture(scope="module")
def compiled():
    model = Decoder().eval()
    return model, semkv.compile(model, method="full", config=PLAIN)


def test_a_bias_hides_other_runs():
    bias = chunk_bias(torch.tensor([[5, 6]]), torch.tensor([[[0, 3, 5, 6]]]), 3)
    assert (bias[0, 0] == 0).tolist() == [[False, True, True, False], [False, False, False, True]]
    k = torch.zeros(1, 2, 2, 4)
    places = torch.tensor([[[3, 7], [4, 5]]])  # each KV head holds others
    read = read_chunk(Entries([k], [k], [places], [torch.full((1, 1, 1, 2), -1.0)]), torch.tensor([[5]]), 2, 2, 3)
    assert read.block_bias[0][0, :, 0].tolist() == [[-1.0, float("-inf")]] * 2 + [[-1.0, -1.0]] * 2


def test_rows_that_cross_chunks_are_the_models(compiled):
    model, mine = compiled
    assert [(site.chunk, site.window, site.treatment) for site in mine.program.sites] == [
        (CHUNK, CHUNK, "window"),
        (0, 0, "exact"),
    ]
    rows = [ids(length, length) for length in (70, 47, 23, 2)]
    batch = torch.cat([F.pad(row, (70 - row.shape[1], 0)) for row in rows])
    mask = torch.cat([F.pad(torch.ones_like(row), (70 - row.shape[1], 0)) for row in rows])
    result = mine.generate(
        batch, attention_mask=mask, max_new_tokens=30, do_sample=False, return_dict_in_generate=True, pad_token_id=0
    )
    wanted = [greedy(model, row, 30) for row in rows]
    assert result.sequences[:, -30:].tolist() == wanted
    more = torch.cat([ids(29, seed) for seed in range(4)])
    said = [torch.cat([row, torch.tensor([own]), more[i : i + 1]], 1) for i, (row, own) in enumerate(zip(rows, wanted))]
    again = mine.generate(more, max_new_tokens=4, do_sample=False, state=result[CACHE], pad_token_id=0)
    assert again[:, -4:].tolist() == [greedy(model, row, 4) for row in said]
    assert result[CACHE].nbytes["window"] < 4 * 100 * 2 * WIDTH * 4  # other chunks are not kept


def test_a_method_treats_the_layers_that_see_all(compiled, tmp_path):
    model, mine = compiled
    kept = mine.with_method("quest", budget=0.5)
    state = kept.prefill(ids(300))
    for token in ids(8, 1)[0]:
        kept.extend(state, token[None, None])
    assert 0.3 < state.stats.device_share <= 0.5
    whole = mine.with_method("quest", budget=1.0)
    with torch.no_grad():
        theirs = model(torch.cat([ids(300), ids(9, 1)], 1))[:, -1]
    assert difference(whole.extend(whole.prefill(ids(300)), ids(9, 1))[:, -1], theirs) < 1e-4
    mine.save(tmp_path / "artifact")
    loaded = semkv.load(tmp_path / "artifact")
    assert loaded.generate(ids(60), max_new_tokens=8).tolist() == mine.generate(ids(60), max_new_tokens=8).tolist()
    with pytest.raises(ConfigError, match=r"layers\.0 attends within chunks of 24 tokens, which no exported step has"):
        mine.export(tmp_path / "step")
