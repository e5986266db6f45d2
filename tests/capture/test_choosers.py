"""Modules that choose which tokens attention reads: what is proven of them, their graphs, and models that have them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import semkv
import semkv.kernels
from semkv.capture.choosers import LENGTH, ROWS, ChoiceSite, check_chooser, find_choosers, prove_chooser, trace_chooser
from semkv.capture.recurrent_sites import CACHE
from semkv.capture.state_cache import StateCache
from semkv.errors import CaptureError, ConfigError
from semkv.ir.choices import chosen_bias
from semkv.ir.memory import Entries, read_chosen
from semkv.ir.ops import attention
from semkv.ir.recurrence import Form
from semkv.model.huggingface import CACHE as STATE
from tests.hybrids import Alone, difference, draw

WIDTH, MOST, VOCAB = 6, 8, 61
PLAIN = semkv.CompileConfig(kernels="torch", floor=0)


class Indexer(nn.Module):
    """The highest products of a query with the keys of all tokens before it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def scores(self, x: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
        return (self.query(x) @ keys.transpose(1, 2)).masked_fill(~mask, float("-inf"))

    def forward(self, x: Tensor, mask: Tensor, cache=None) -> Tensor:
        keys = self.key(x)
        keys = keys if cache is None else cache.update_indexer(keys, 0)
        scores = self.scores(x, keys, mask)
        return scores.topk(min(MOST, scores.shape[-1]), -1).indices.to(torch.int32)


class LooksAhead(Indexer):
    def scores(self, x, keys, mask):
        return (self.query(x) @ keys.transpose(1, 2)) + 9 * keys.mean(1, keepdim=True).sum(-1, keepdim=True) * keys.sum(
            -1
        )[:, None]


class MixesRows(Indexer):
    def scores(self, x, keys, mask):
        return super().scores(x + 3 * x.flip(0), keys, mask)


class Forgets(Indexer):
    """It scores the new tokens' keys alone, wherever they stand."""

    def forward(self, x, mask, cache=None):
        keys = self.key(x)
        whole = keys if cache is None else cache.update_indexer(keys, 0)
        scores = torch.zeros_like(mask, dtype=x.dtype)
        scores[..., : x.shape[1]] = super().scores(x, keys, mask[..., : x.shape[1]])
        return scores.topk(min(MOST, whole.shape[1]), -1).indices.to(torch.int32)


class Random(Indexer):
    def scores(self, x, keys, mask):
        return super().scores(x, keys, mask) + torch.rand(mask.shape)


class LeavesOutFew(Indexer):
    def forward(self, x, mask, cache=None):
        return super().forward(x, mask, cache)[..., : max(1, min(MOST, mask.shape[-1]) - 2)]


class Lowest(Indexer):
    def scores(self, x, keys, mask):
        return (-super().scores(x, keys, mask)).masked_fill(~mask, float("-inf"))


class BranchesOnValues(Indexer):
    def scores(self, x, keys, mask):
        return super().scores(x if float(x.sum()) > 0 else -x, keys, mask)


def site_of(module: nn.Module, most: int = MOST) -> ChoiceSite:
    leaves, spec = pytree.tree_flatten(((None, None), {"cache": CACHE}))
    form = Form((WIDTH,), torch.float32)
    return ChoiceSite(
        name="layer.indexer",
        module=module.eval(),
        config=None,
        kind=StateCache,
        keys=[],
        inputs=(form,),
        states=(form,),
        outputs=(Form((), torch.int32),),
        leaves=leaves,
        spec=spec,
        places=[0],
        returned=[True],
        out_spec=None,
        weights=dict(module.named_parameters()),
        mask=1,
        most=most,
    )


def text() -> list[Tensor]:
    return [torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(2))]


# -- the proof ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_an_indexer_is_proven_and_its_graphs_choose_the_same():
    site = site_of(Indexer())
    assert "chooses 8 tokens for each" in prove_chooser(site, text())
    body = trace_chooser(site, text())
    assert set(body.modules_by_name()) == {"keys", "choose"}
    (places,), keys = body(text(), None, list(site.weights.values()))
    theirs, whole = site.after(text(), None)
    assert torch.equal(places, theirs)
    assert [x.shape for x in keys] == [(1, LENGTH, WIDTH)] * ROWS
    assert torch.equal(torch.cat(keys), whole)
    ragged = [keys[0][:, :3], keys[1], keys[2][:, :20]]  # the third row has places left over, the first reads all
    (places,), after = body([x[:, :1] for x in text()], ragged, list(site.weights.values()))
    assert [x.shape[1] for x in after] == [4, LENGTH + 1, 21]
    assert places[0, 0].tolist() == [0, 1, 2, 3, -1, -1, -1, -1]


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (LooksAhead, "other tokens later on is given another choice"),
        (MixesRows, "a row alone is given another choice"),
        (Forgets, "pieces of .* tokens and others is given another choice"),
        (Random, "chooses otherwise each time"),
        (LeavesOutFew, "leaves out some of 8 tokens"),
    ],
)
@torch.no_grad()
def test_what_does_not_choose_by_keys_that_are_kept_is_refused(module, says):
    with pytest.raises(CaptureError, match=rf"layer.indexer \({module.__name__}\).*{says}"):
        prove_chooser(site_of(module()), text())


@torch.no_grad()
def test_a_branch_on_values_is_refused():
    with pytest.raises(CaptureError, match=r"layer\.indexer .* cannot be captured"):
        trace_chooser(site_of(BranchesOnValues()), text())


@torch.no_grad()
def test_graphs_of_another_module_are_noticed():
    body = trace_chooser(site_of(Indexer()), text())
    with pytest.raises(CaptureError, match="its graphs do not choose what it does"):
        check_chooser(site_of(Lowest()), body, text())


# -- attention over what was chosen ------------------------------------------------------------------------------------


def test_a_bias_shows_chosen_places_alone():
    chosen = torch.tensor([[[0, 3], [1, -1]]])
    bias = chosen_bias(chosen, torch.tensor([[[0, 1, 2, 3, 2**31 - 1]]]))
    assert (bias[0, 0] == 0).tolist() == [[True, False, False, True, False], [False, True, False, False, False]]


def test_attention_reads_what_was_chosen():
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 3)
    chosen = torch.randint(0, 5, (2, 5, 2))
    chosen[..., 0] = 0
    positions = torch.arange(5).expand(2, 5).contiguous()
    mask = torch.zeros(2, 1, 5, 5, dtype=torch.bool).scatter(3, chosen[:, None], True).tril()
    expected = F.scaled_dot_product_attention(q, k, v, mask, scale=0.5, enable_gqa=True)
    assert torch.allclose(attention(q, k, v, positions, chosen=chosen, site=0, scale=0.5), expected, atol=1e-6)


def test_a_query_of_whose_tokens_none_is_held_reads_what_is():
    k = torch.zeros(1, 2, 3, 4)
    places = torch.tensor([[[0, 2, 4], [1, 2, 3]]])  # each KV head holds others
    chosen, positions = torch.tensor([[[0, 4], [3, 5]]]), torch.tensor([[5, 6]])
    read = read_chosen(Entries([k], [k], [places]), chosen, positions, 2, 2)
    seen = (read.block_bias[0] == 0)[0].tolist()
    first, second = [[True, False, True], [True, True, True]], [[True, True, True], [False, False, True]]
    assert seen == [first, first, second, second]


# -- models ------------------------------------------------------------------------------------------------------------


def decoder(kind: str, **more) -> nn.Module:
    """A tiny random model with indexers that choose 8 tokens each."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=8,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        index_n_heads=4,
        index_head_dim=16,
        index_topk=8,
        max_position_embeddings=1024,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
        **more,
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    draw(model)
    return model.eval()


@pytest.fixture(scope="module")
def sparse():
    """A model of two layers, and what was compiled of it."""
    model = decoder("DeepseekV32", num_hidden_layers=2)
    return model, semkv.compile(model, method="full", config=PLAIN)


def ids(length: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCAB, (1, length), generator=torch.Generator().manual_seed(seed))


def followed(
    mine: semkv.CompiledModel, model: nn.Module, steps: int = 24, chunk: int = 300
) -> tuple[float, semkv.State]:
    """The largest difference from the model's own cached steps after 300 tokens, and the state. chunk: in which the model reads those:
    among equal scores another one is chosen where there are other tokens behind them."""
    alone, state = Alone(model), mine.prefill(ids(300))
    read = [alone.read(part) for part in ids(300).split(chunk, 1)]
    worst = difference(state.logits, read[-1][:, -1])
    for token in ids(steps, 1)[0]:
        made = mine.extend(state, token[None, None])[:, -1]
        worst = max(worst, difference(made, alone.read(token[None, None])[:, -1]))
    return worst, state


def test_rows_turns_and_forks_are_the_models(sparse, tmp_path):
    model, mine = sparse
    assert [(site.chooser, site.window) for site in mine.program.sites] == [(0, 0), (1, 0)]
    assert [site.chooses for site in mine.program.choosers] == [8, 8]
    told = " ".join(semkv.explain(mine).split())
    assert "the model chooses what attention reads, by index keys of 128 bytes a token beside the budget" in told
    rows = [ids(length, length) for length in (90, 41, 5)]
    alone = [Alone(model) for _ in rows]
    wanted = [one.answer(row, 6) for one, row in zip(alone, rows)]
    batch = torch.cat([F.pad(row, (90 - row.shape[1], 0)) for row in rows])
    mask = torch.cat([F.pad(torch.ones_like(row), (90 - row.shape[1], 0)) for row in rows])
    result = mine.generate(batch, attention_mask=mask, max_new_tokens=6, do_sample=False, return_dict_in_generate=True)
    assert result.sequences[:, -6:].tolist() == wanted
    more = torch.cat([ids(7, seed) for seed in range(3)])
    again = mine.generate(more, max_new_tokens=6, do_sample=False, state=result[STATE])
    assert again[:, -6:].tolist() == [one.answer(more[i : i + 1], 6) for i, one in enumerate(alone)]
    state = mine.prefill(rows[0])
    fork = state.fork()
    mine.extend(state, ids(20, 2))
    fork.save(tmp_path / "state")
    loaded = mine.load_state(tmp_path / "state")
    one = Alone(model)
    one.read(rows[0])
    theirs = one.read(ids(9, 3))[:, -1]
    assert difference(mine.extend(fork, ids(9, 3))[:, -1], theirs) < 1e-4
    assert difference(mine.extend(loaded, ids(9, 3))[:, -1], theirs) < 1e-4


def test_states_of_a_step_together(sparse):
    model, mine = sparse
    texts, alone = [ids(length, length) for length in (37, 60, 1)], [Alone(model) for _ in range(3)]
    states = [mine.prefill(text) for text in texts]
    theirs = torch.cat([one.read(text)[:, -1] for one, text in zip(alone, texts)])
    for _ in range(4):
        chosen = theirs.argmax(-1)
        made = mine.step(states, chosen)
        theirs = torch.cat([one.read(token[None, None])[:, -1] for one, token in zip(alone, chosen)])
        assert difference(made, theirs) < 1e-4


@pytest.mark.slow
def test_latents_are_fetched_as_they_are_chosen(sparse):
    model, _ = sparse
    settings = semkv.CompileConfig(kernels="torch", floor=0, latents=True)
    mine = semkv.compile(model, method="indexer", budget=0.3, config=settings)
    assert [site.kv_heads for site in mine.program.sites] == [1, 1]
    worst, state = followed(mine, model)
    assert worst < 1e-4
    assert state.stats.device_share <= 0.3


@pytest.mark.slow
def test_chunks_of_a_prompt_are_the_whole(sparse):
    model, _ = sparse
    mine = semkv.compile(model, method="full", config=semkv.CompileConfig(kernels="torch", floor=0, prefill_chunk=64))
    assert followed(mine, model, 3, chunk=64)[0] < 1e-4


def test_the_models_own_choice_is_all_that_is_fetched(sparse):
    model, compiled = sparse
    mine = compiled.with_method("indexer", budget=0.15)
    worst, state = followed(mine, model)
    assert worst < 1e-4
    assert state.stats.device_share <= 0.15
    token = sum(site.values_per_token for site in mine.program.stores) * 4
    assert 0 < state.stats.moved_bytes_per_step <= 8 * token  # no more than what was chosen, in each layer
    assert state.nbytes["recurrent"] == 324 * 2 * 16 * 4  # an index key of each token and layer
    assert followed(compiled.with_method("streaming_llm", budget=0.15), model, 4)[0] > 0.1


@pytest.mark.parametrize("method", ["snapkv", "quest"])
def test_other_methods_hold_their_budget(sparse, method):
    model, mine = sparse
    _, state = followed(mine.with_method(method, budget=0.5), model, 12)
    assert 0.3 < state.stats.device_share <= 0.5
    assert state.stats.attended_share <= 0.5
    assert bool(torch.isfinite(state.logits).all())


def test_what_no_choice_names_is_refused(sparse, tmp_path):
    _, mine = sparse
    with pytest.raises(ConfigError, match=r"method 'sekv' attends to means, codes or factors .* use 'full', 'indexer'"):
        mine.with_method("sekv", budget=0.5, router="coarse")
    with pytest.raises(ConfigError, match=r"model.layers.0.self_attn.indexer goes on from states of its own"):
        mine.export(tmp_path / "step")


def test_an_artifact_needs_no_modelling_code(sparse, tmp_path):
    _, mine = sparse
    mine.save(tmp_path / "artifact")
    loaded = semkv.load(tmp_path / "artifact")
    assert loaded.fingerprint == mine.fingerprint
    assert torch.equal(loaded.generate(ids(60), max_new_tokens=8), mine.generate(ids(60), max_new_tokens=8))


@pytest.mark.slow
def test_layers_that_share_a_choice_read_the_same():
    model = decoder("GlmMoeDsa", num_hidden_layers=3, indexer_types=["full", "shared", "full"])
    assert [site.name for site, _ in find_choosers(model)] == [
        "model.layers.0.self_attn.indexer",
        "model.layers.2.self_attn.indexer",
    ]
    mine = semkv.compile(model, method="indexer", budget=0.2, config=PLAIN)
    assert [site.chooser for site in mine.program.sites] == [0, 0, 1]
    assert followed(mine, model, 8)[0] < 1e-4


def test_a_model_without_an_indexer_has_no_use_for_the_method():
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_attention_heads=2, num_hidden_layers=1
    )
    with pytest.raises(
        ConfigError, match=r"method 'indexer' reads what the model's own indexer chooses, and .*self_attn has none"
    ):
        semkv.compile(transformers.LlamaForCausalLM(config).eval(), method="indexer", budget=0.2, config=PLAIN)
