"""A model that is merged, switched, trained or loaded anew after its compilation: the compiled one follows or refuses, never mixes."""

from __future__ import annotations

import copy
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

import peft
import pytest
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import semkv
from semkv.artifact.fingerprint import model_fingerprint
from semkv.compiled import CompiledModel
from semkv.errors import ProfileError, StaleModelError, StateError
from semkv.live.model import LiveModel, program_of
from semkv.methods import StreamingLLM, find_method

VOCAB = 41
REFRESH = r"compiled\.refresh\(\) captures it as it is now; or undo the change"


def llama(layers: int = 1, **settings: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=8,
        max_position_embeddings=300,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
        **settings,
    )
    return sensitive(LlamaForCausalLM(config)).eval()


def sensitive(model: Any, by: float = 4.0) -> Any:
    """Random weights large enough that tokens depend on what was read long before."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.mul_(by)
    return model


def lora(**settings: Any) -> peft.LoraConfig:
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **settings)


def ids(tokens: int = 40, seed: int = 0) -> Tensor:
    return torch.randint(2, VOCAB, (1, tokens), generator=torch.Generator().manual_seed(seed))


def assert_agrees(compiled: CompiledModel, model: Any, atol: float = 2e-4) -> Tensor:
    """Prefill, an extension, decode steps and `generate` give what the model itself gives; the logits of the prompt."""
    prompt, more = ids(), ids(3, seed=1)
    with torch.no_grad():
        expected = model(torch.cat([prompt, more], 1)).logits
    state = compiled.prefill(prompt)
    first = state.logits.clone()
    torch.testing.assert_close(first, expected[:, -4], rtol=1e-4, atol=atol)
    compiled.extend(state, more[:, :2])
    got = compiled.extend(state, more[:, 2:])
    torch.testing.assert_close(got[:, 0], expected[:, -1], rtol=1e-4, atol=atol)
    if hasattr(model, "generate"):
        options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
        assert compiled.generate(prompt, **options).tolist() == model.generate(input_ids=prompt, **options).tolist()
    return first


@dataclass(frozen=True)
class Sorted(StreamingLLM):
    """Streaming whose KV heads have two roles in turn, so that weights are permuted."""

    name: ClassVar[str] = "sorted"

    def head_roles(self, program: Any, profile: Any) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple("ab"[head % 2] for head in range(site.kv_heads)) for site in program.stores)


def compiled_on(model: nn.Module, method: Any, budget: Any = None, **settings: Any) -> CompiledModel:
    """`semkv.compile` for a method that is no name."""
    chosen, fingerprint = semkv.CompileConfig(**settings), model_fingerprint(model)
    program = program_of(model, chosen, None, fingerprint)
    live = LiveModel(model, program, None)
    return CompiledModel(program, None, method, budget, chosen, fingerprint=fingerprint, live=live)


# -- adapters ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def adapted() -> Any:
    """A Llama under PEFT with the adapters `default`, which is active, and `other`."""
    model = peft.get_peft_model(llama(), lora())
    model.add_adapter("other", lora())
    return model.eval()


def test_a_merged_adapter_is_never_counted_twice(adapted):
    compiled = semkv.compile(adapted)
    small = compiled.with_method("streaming_llm", 200)
    before = assert_agrees(compiled, adapted)
    state, record = compiled.prefill(ids()), small.prefill_record(ids())
    was = compiled.program
    adapted.merge_adapter()
    for call in (
        lambda: compiled.prefill(ids()),
        lambda: small.generate(ids(), max_new_tokens=2),
        lambda: compiled.extend(state, ids(1)),
        lambda: compiled(ids()),
        lambda: compiled.prefill_record(ids()),
        lambda: small.compress(record),
        lambda: compiled.with_method("snapkv", 0.5),
        lambda: compiled.save("never"),
        lambda: state.save("never"),
        lambda: compiled.load_state("never"),
    ):
        with pytest.raises(StaleModelError, match=rf"q_proj\.merged_adapters: \[\] -> \['default'\].*{REFRESH}"):
            call()
    assert compiled.program is was
    compiled.refresh()
    merged = assert_agrees(compiled, adapted)
    torch.testing.assert_close(merged, before, rtol=1e-3, atol=1e-3)
    with pytest.raises(StateError, match="this state was made before the model's weights changed: read the text again"):
        compiled.extend(state, ids(1))
    with pytest.raises(StaleModelError, match="merged_adapters"):
        small.prefill(ids())  # each notices, and is refreshed, by itself
    adapted.unmerge_adapter()
    torch.testing.assert_close(assert_agrees(small, adapted), before, rtol=1e-3, atol=1e-3)
    with pytest.raises(StaleModelError, match=r"merged_adapters: \['default'\] -> \[\]"):
        compiled.prefill(ids())


def test_switched_and_disabled_adapters_are_refused_until_undone(adapted):
    compiled = semkv.compile(adapted)
    with_default = assert_agrees(compiled, adapted)
    state = compiled.prefill(ids())
    with (
        adapted.disable_adapter(),
        pytest.raises(StaleModelError, match=r"layers\.0.*q_proj\._disable_adapters: False -> True"),
    ):
        compiled.generate(ids(), max_new_tokens=2)
    compiled.extend(state, ids(2))  # undone: states of before go on
    assert torch.equal(assert_agrees(compiled, adapted), with_default)

    adapted.set_adapter("other")
    with pytest.raises(StaleModelError, match=r"_active_adapter: \['default'\] -> \['other'\]"):
        compiled.prefill(ids())
    compiled.refresh()
    with_other = assert_agrees(compiled, adapted)
    assert (with_other - with_default).abs().max() > 0.1

    adapted.add_adapter("third", lora())
    with pytest.raises(StaleModelError, match=r"q_proj\.scaling: .* -> \{.*'third': 2\.0\}"):
        compiled.prefill(ids())
    adapted.delete_adapter("third")
    assert torch.equal(assert_agrees(compiled, adapted), with_other)


def test_an_adapter_that_is_trained_is_followed(adapted):
    compiled = semkv.compile(adapted)
    before = compiled.prefill(ids()).logits
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=0.05)
    adapted.train()
    adapted(ids(), labels=ids()).loss.backward()
    optimizer.step()
    with pytest.raises(StaleModelError, match=r"training: False -> True"):
        compiled.prefill(ids())
    adapted.eval()
    assert (assert_agrees(compiled, adapted) - before).abs().max() > 0.05


def test_merge_and_unload_is_refused_with_and_without_the_wrapper(adapted):
    compiled = semkv.compile(adapted)
    plain = adapted.merge_and_unload()
    with pytest.raises(StaleModelError, match=r"q_proj: Linear -> another Linear"):
        compiled.prefill(ids())
    del adapted, compiled

    model = peft.get_peft_model(llama(), lora()).eval()
    compiled = semkv.compile(model)
    plain = model.merge_and_unload()
    del model
    gc.collect()
    with pytest.raises(StaleModelError):
        compiled.prefill(ids())
    with torch.no_grad():
        assert plain(ids()).logits.isfinite().all()


def test_adapters_that_are_put_into_the_model_itself():
    """As `model.add_adapter` of transformers does: no wrapper around the model."""
    model = llama()
    compiled = semkv.compile(model)
    bare = assert_agrees(compiled, model)
    peft.inject_adapter_in_model(lora(), model, "first")
    model.eval()
    with pytest.raises(StaleModelError, match=r"layers\.0\.self_attn\.q_proj: Linear -> another Linear"):
        compiled.prefill(ids())
    compiled.refresh()
    first = assert_agrees(compiled, model)
    assert (first - bare).abs().max() > 0.1
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    with pytest.raises(StaleModelError, match=r"_disable_adapters: False -> True"):
        compiled.prefill(ids())
    for layer in layers:
        layer.enable_adapters(True)
    assert torch.equal(assert_agrees(compiled, model), first)


# -- weights -----------------------------------------------------------------------------------------------------------


class Scaled(nn.Embedding):
    """An embedding times a number of which a pass folds a constant."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("strength", torch.tensor(0.5))

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * (self.strength * 2 + 1)


@pytest.fixture(scope="module")
def scaled() -> LlamaForCausalLM:
    model = llama(2)
    embedding = Scaled(VOCAB, 32)
    embedding.load_state_dict({"weight": model.get_input_embeddings().weight, "strength": torch.tensor(0.5)})
    model.set_input_embeddings(embedding)
    return model.eval()


@pytest.fixture(scope="module")
def both(scaled):
    """Full, and a method whose weights are permuted, both followed from one capture."""
    sorted_ = compiled_on(scaled, Sorted(), 200)
    assert [site.head_order for site in sorted_.program.sites] == [(0, 2, 1, 3)] * 2
    held = dict(sorted_.program.decode.named_parameters())
    assert sum("by_role" in name for name in held) == 8  # query, key, value and output of two layers
    assert any(name.startswith("constant_") for name, _ in sorted_.program.decode.named_buffers())
    return sorted_.with_method("full"), sorted_


def load(model: nn.Module, **options: Any) -> None:
    other = {name: x * 1.1 if x.is_floating_point() else x for name, x in model.state_dict().items()}
    model.load_state_dict(other, **options)


def train(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    model(ids(), labels=ids()).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def each(change: Any) -> Any:
    """`change(parameter)` of every parameter."""

    def changed(model: nn.Module) -> None:
        for parameter in model.parameters():
            change(parameter)

    return changed


def multiply(parameter: Tensor) -> None:
    with torch.no_grad():
        parameter.mul_(0.9)


def add_to_data(parameter: Tensor) -> None:
    parameter.data.add_(0.01)


def replace_data(parameter: Tensor) -> None:
    parameter.data = parameter.data * 1.05


def replace_parameter(model: nn.Module) -> None:
    layer = model.model.layers[1].self_attn.k_proj
    layer.weight = nn.Parameter(layer.weight.detach() * 0.8)


def change_buffer(model: nn.Module) -> None:
    model.get_input_embeddings().strength.mul_(1.5)


def exchange_buffer(model: nn.Module) -> None:
    model.get_input_embeddings().strength = torch.tensor(0.7)


CHANGES = {
    "load_state_dict": load,
    "load_state_dict(assign=True)": lambda model: load(model, assign=True),
    "a training step": train,
    "in place": each(multiply),
    ".data in place": each(add_to_data),
    ".data replaced": each(replace_data),
    "a parameter replaced": replace_parameter,
    "a buffer in place": change_buffer,
    "a buffer replaced": exchange_buffer,
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_new_weights_are_followed(scaled, both, change):
    """Shared, permuted and folded: every kind of copy. States and records of before are refused."""
    before = [assert_agrees(compiled, scaled) for compiled in both]
    states = [compiled.prefill(ids()) for compiled in both]
    record, fingerprint = both[0].prefill_record(ids()), both[0].fingerprint
    CHANGES[change](scaled)
    for compiled, was, state in zip(both, before, states):
        with pytest.raises(StateError, match="this state was made before the model's weights changed"):
            compiled.extend(state, ids(2))
        with pytest.raises(StateError, match="this state was made before the model's weights changed"):
            compiled.generate(ids(2), state=state, max_new_tokens=2)
        with pytest.raises(StateError, match="the record was made before the model's weights changed"):
            compiled.compress(record)
        with pytest.raises(StateError, match="this state was made before the model's weights changed"):
            state.save("never")
        assert (assert_agrees(compiled, scaled) - was).abs().max() > 1e-2
        assert compiled.fingerprint == model_fingerprint(scaled) != fingerprint


def test_nothing_is_copied_that_is_not_derived(scaled, both):
    """After all those changes the tensors are the model's own, as after compiling."""
    for compiled in both:
        compiled.prefill(ids())
        theirs = {x.data_ptr() for x in scaled.parameters()}
        ours = {x.data_ptr() for x in compiled._source.body.parameters()}
        assert ours <= theirs
    full = both[0]
    was = full.program
    add_to_data(scaled.lm_head.weight)
    full.prefill(ids())
    assert full.program is was, "nothing in it was made of weights: it is not lowered again"


@pytest.mark.parametrize("change", ["in place", "a buffer in place", "a buffer replaced", "a parameter replaced"])
def test_graphs_that_are_shared_are_of_the_new_weights_too(scaled, change):
    """Methods that share lowered graphs follow one after the other, and one that is made then has nothing of the old numbers."""
    full = semkv.compile(scaled, method="full")
    same = full.with_method("snapkv", 200)
    assert same.program.decode is full.program.decode
    for compiled in (full, same):
        assert_agrees(compiled, scaled)
    CHANGES[change](scaled)
    assert_agrees(full, scaled)
    assert_agrees(full.with_method("h2o", 200), scaled)
    assert_agrees(same, scaled)
    assert_agrees(same.with_method("h2o", 200), scaled)


def test_a_new_compiled_form_is_of_the_new_weights(scaled, both):
    multiply(scaled.model.layers[0].mlp.up_proj.weight)
    assert_agrees(both[0].with_method("snapkv", 200), scaled)


def test_generate_looks_once(scaled, both, monkeypatch):
    looked: list[bool] = []
    look = LiveModel.look

    def counted(live: LiveModel, *, sample: bool = True) -> Any:
        looked.append(sample)
        return look(live, sample=sample)

    monkeypatch.setattr(LiveModel, "look", counted)
    both[0].generate(ids(), max_new_tokens=5)
    assert looked == [True]
    state = both[0].prefill(ids())
    both[0].extend(state, ids(2))
    both[0].extend(state, ids(1))  # one token: no numbers are compared
    assert looked == [True, True, True, False]


def test_two_threads_see_a_change_at_once(scaled, both):
    each(multiply)(scaled)
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda number: both[number % 2].prefill(ids()).logits, range(4)))
    with torch.no_grad():
        expected = scaled(ids()).logits[:, -1]
    for logits in made:
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=2e-4)


class Biased(nn.Module):
    """One layer whose learned slopes become numbers of the program when it is captured."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCAB, 32), nn.Linear(32, VOCAB)
        self.qkv = nn.Linear(32, 96)
        self.slopes = nn.Parameter(torch.tensor([0.5, 0.25, 0.1, 0.02]))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        ahead = places[None, :] - places[:, None]
        bias = self.slopes[:, None, None] * ahead.to(x.dtype)
        bias = bias.masked_fill(ahead > 0, float("-inf"))
        out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias[None])
        return self.head(x + out.transpose(1, 2).flatten(2))


class Output(nn.Module):
    """What `assert_agrees` asks of a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, given: Tensor) -> Any:
        return type("Logits", (), {"logits": self.model(given)})


def test_numbers_that_capture_computed_are_computed_again():
    model = sensitive(Biased(), 3.0).eval()
    compiled = semkv.compile(model)
    assert compiled._source.evaluated == ("slopes",)
    assert_agrees(compiled, Output(model))
    program = compiled.program
    multiply(model.qkv.weight)
    assert_agrees(compiled, Output(model))
    assert compiled.program is program, "other weights need no capture"
    with torch.no_grad():
        model.slopes.copy_(torch.tensor([0.01, 0.3, 0.2, 0.4]))
    assert_agrees(compiled, Output(model))
    assert compiled.program is not program


@pytest.mark.slow
def test_a_retrieval_head_in_front_of_the_model_follows():
    model, tokenizer = semkv.bundled.load()
    profile = semkv.bundled.profile()
    compiled = semkv.compile(model, profile, method="specontext", budget=0.5)
    prompt = tokenizer("The garden behind the house. " * 20, return_tensors="pt").input_ids
    before = compiled.prefill(prompt).logits
    load(model, assign=True)
    with pytest.warns(UserWarning, match="the profile was calibrated with other weights than the model has now"):
        after = compiled.prefill(prompt)
    anew = compiled_on(model, find_method("full"))
    fresh = CompiledModel(anew._source, profile, compiled.method, 0.5, compiled.settings).prefill(prompt)
    assert torch.equal(after.logits, fresh.logits)
    assert not torch.equal(after.logits, before)
    with pytest.raises(ProfileError, match="this profile belongs to another model"):
        compiled.save("never")
    with pytest.raises(ProfileError, match="this profile belongs to another model"):
        compiled.refresh(profile)
    with pytest.warns(UserWarning, match=r"calibrate again, and pass it to compiled\.refresh\(profile=\.\.\.\)"):
        compiled.refresh()
    assert torch.equal(compiled.prefill(prompt).logits, fresh.logits)


# -- structure ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain() -> tuple[LlamaForCausalLM, CompiledModel]:
    model = llama()
    return model, semkv.compile(model)


def test_a_structure_that_changed_is_refused_by_name(plain):
    model, compiled = plain
    before = assert_agrees(compiled, model)
    layer = model.model.layers[0]

    class Louder(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    def replaced(owner: Any, name: str, value: Any) -> Any:
        """What puts `value` there, and what undoes it."""
        own = name in vars(owner) or name in owner._modules or name in owner._parameters
        was = getattr(owner, name)

        def undo() -> None:
            setattr(owner, name, was) if own else delattr(owner, name)

        return lambda: setattr(owner, name, value), undo

    hooks: list[Any] = []
    tokens = nn.Parameter(torch.cat([model.lm_head.weight.detach(), torch.zeros(1, 32)]))
    cases = [
        (replaced(layer, "mlp", Louder()), r"model\.layers\.0\.mlp: LlamaMLP -> Louder"),
        (replaced(layer.self_attn, "scaling", 0.1), r"self_attn\.scaling: 0\.35\d+ -> 0\.1"),
        (replaced(layer.input_layernorm, "variance_epsilon", 0.5), r"variance_epsilon: 1e-06 -> 0\.5"),
        (replaced(model, "forward", lambda *a, **k: None), r"forward: replaced by another function"),
        (replaced(model.lm_head, "weight", tokens), r"lm_head\.weight: \(41, 32\) -> \(42, 32\)"),
        (replaced(model.lm_head, "bias", nn.Parameter(torch.ones(VOCAB))), r"lm_head\.bias: \(none\) -> a tensor"),
        ((lambda: layer.double(), lambda: layer.float()), r"weight: torch\.float32 -> torch\.float64"),
        ((lambda: model.train(), lambda: model.eval()), r"training: False -> True"),
        (
            (
                lambda: hooks.append(layer.register_forward_hook(lambda m, i, o: o * 2)),
                lambda: hooks.pop().remove(),
            ),
            r"hooks of model\.layers\.0: \(none\) -> .*lambda",
        ),
    ]
    for (change, undo), message in cases:
        change()
        with pytest.raises(StaleModelError, match=rf"the model changed after it was compiled: .*{message}.*{REFRESH}"):
            compiled.prefill(ids())
        undo()
        torch.testing.assert_close(assert_agrees(compiled, model), before)


def test_refresh_takes_over_another_structure_and_dtype():
    model = llama(tie_word_embeddings=True)
    compiled = semkv.compile(model).with_method("streaming_llm", 200)
    model.resize_token_embeddings(VOCAB + 3)
    model.double()
    with pytest.raises(StaleModelError, match="embed_tokens"):
        compiled.prefill(ids())
    compiled.refresh()
    assert compiled.method.name == "streaming_llm"
    assert compiled.budget == 200
    assert compiled.dtype == torch.float64 == compiled.placement.budget.dtype
    assert compiled.config.vocab_size == compiled.program.vocab_size == VOCAB + 3
    assert_agrees(compiled, model, atol=1e-8)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 2)
    with pytest.raises(StaleModelError, match=r"embed_tokens\.weight and lm_head\.weight: one tensor -> several"):
        compiled.prefill(ids())


def test_what_only_looks_at_the_model_changes_nothing(plain):
    """Its own forward, generation, outputs of all layers, a copy, files: no refusal, and states go on."""
    model, compiled = plain
    state, weights = compiled.prefill(ids()), compiled.placement.weights
    with torch.no_grad():
        model(ids(), output_hidden_states=True)
    model.generate(ids(), max_new_tokens=3, attention_mask=torch.ones_like(ids()))
    copy.deepcopy(model)
    model.state_dict()
    model.requires_grad_(False)
    model.requires_grad_(True)
    model(ids(), labels=ids()).loss.backward()
    model.config.use_cache = False
    model.generation_config.max_new_tokens = 5
    model.train()
    model.eval()
    model.note = "mine"
    compiled.extend(state, ids(2))
    assert compiled.placement.weights is weights


# -- whose model it is -------------------------------------------------------------------------------------------------


def test_the_users_model_is_not_kept_alive():
    model = llama()
    compiled = semkv.compile(model)
    before = compiled.prefill(ids())
    gone, weight = weakref.ref(model), model.lm_head.weight
    del model
    gc.collect()
    assert gone() is None
    compiled.extend(before, ids(2))  # nothing changed: it runs on
    with pytest.raises(StaleModelError, match="the model that was compiled is gone, so it cannot be captured again"):
        compiled.refresh()
    multiply(weight)
    with pytest.raises(StaleModelError, match=r"is gone, and its weights were changed since \(lm_head\.weight\)"):
        compiled.prefill(ids())


def test_artifacts_and_copies_have_weights_of_their_own(tmp_path):
    model = llama()
    compiled = semkv.compile(model)
    expected = compiled.prefill(ids()).logits
    compiled.save(tmp_path / "model")
    loaded, copied = semkv.load(tmp_path / "model"), copy.deepcopy(compiled)
    each(multiply)(model)
    for other in (loaded, copied):
        torch.testing.assert_close(other.prefill(ids()).logits, expected)
    with pytest.raises(StaleModelError, match=r"it was loaded, or made of a program.*semkv\.compile"):
        loaded.refresh()
    with pytest.raises(StaleModelError, match="the model that was compiled is gone"):
        copied.refresh()
    assert (assert_agrees(compiled, model) - expected).abs().max() > 1e-2
