"""`forward`, and the face of a module, are what Hugging Face's callers expect, or say no by name."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch
import transformers

import semkv
from semkv.errors import ConfigError, InputError
from semkv.model.huggingface import CACHE


@pytest.fixture
def padded(ids):
    """Rows of 30, 19 and 7 tokens, padded on the left."""
    prompt, mask = ids(30, 3), torch.ones(3, 30, dtype=torch.int64)
    for row, padding in enumerate((0, 11, 23)):
        prompt[row, :padding], mask[row, :padding] = 0, 0
    return prompt, mask


def test_logits_of_all_positions(model, full, small, ids):
    expected = model(ids(90, 2)).logits
    for compiled in (full, small):  # a prompt is read in full attention, whatever is kept of it
        torch.testing.assert_close(compiled(ids(90, 2)).logits, expected, rtol=1e-8, atol=1e-9)


def test_logits_of_padded_rows(model, full, padded):
    prompt, mask = padded
    for ids, real in ((prompt, mask), (prompt.flip(1), mask.flip(1))):
        got = full(ids, attention_mask=real).logits
        assert got.shape == (3, 30, 41)
        for row in range(3):
            own = real[row].bool()
            expected = model(ids[row : row + 1, own]).logits[0]
            torch.testing.assert_close(got[row, own], expected, rtol=1e-8, atol=1e-9)
            assert not bool(got[row, ~own].any())


@pytest.mark.parametrize("keep", [1, 2, 7, 30, torch.tensor([0, 4, 29])], ids=str)
def test_logits_to_keep(model, full, ids, keep):
    expected = model(ids(30, 2), logits_to_keep=keep).logits
    torch.testing.assert_close(full(ids(30, 2), logits_to_keep=keep).logits, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("chunk", [1, 7, 29, 30, 31])
def test_logits_of_prompts_that_are_read_in_chunks(model, full, ids, chunk):
    chunked = full.with_method("full", config=semkv.CompileConfig(prefill_chunk=chunk))
    for keep in (0, 9):
        expected = model(ids(30), logits_to_keep=keep).logits
        torch.testing.assert_close(chunked(ids(30), logits_to_keep=keep).logits, expected, rtol=1e-8, atol=1e-9)


def test_logits_of_more_tokens_of_a_state(model, full, ids):
    whole = model(ids(40, 2)).logits
    out = full(ids(40, 2)[:, :22])
    more = full(ids(40, 2)[:, 22:], **{CACHE: out[CACHE]})
    torch.testing.assert_close(more.logits, whole[:, 22:], rtol=1e-8, atol=1e-9)
    one = full(ids(1, 2), **{CACHE: more[CACHE]})
    assert one.logits.shape == (2, 1, 41)


def test_logits_of_more_tokens_in_padded_rows(model, full, padded, ids):
    prompt, mask = padded
    out = full(ids(12, 3, seed=3))
    got = full(prompt, attention_mask=mask, **{CACHE: out[CACHE]}).logits
    for row in range(3):
        own = mask[row].bool()
        text = torch.cat([ids(12, 3, seed=3)[row], prompt[row, own]])[None]
        torch.testing.assert_close(got[row, own], model(text).logits[0, 12:], rtol=1e-8, atol=1e-9)


def test_labels_give_the_loss(model, full, ids):
    labels = ids(30, 2).clone()
    labels[0, :11] = -100
    expected = model(ids(30, 2), labels=labels)
    got = full(ids(30, 2), labels=labels)
    torch.testing.assert_close(got.loss.double(), expected.loss.detach().double(), rtol=1e-6, atol=1e-6)
    assert got.loss.item() != pytest.approx(model(ids(30, 2), labels=ids(30, 2)).loss.item())
    with pytest.raises(InputError, match=r"labels \(2, 29\) do not match logits \(2, 30\)"):
        full(ids(30, 2), labels=labels[:, 1:])
    with pytest.raises(InputError, match=r"labels \(2, 30\) do not match logits \(2, 1\)"):
        full(ids(30, 2), labels=labels, logits_to_keep=1)
    state = full.prefill(ids(9))
    with pytest.raises(InputError, match=r"labels \(1, 3\) do not match logits \(1, 4\)"):
        full(ids(4), labels=ids(3), **{CACHE: state})
    assert state.lengths == [9]  # refused before anything is read


def test_positions_are_those_that_a_memory_counts(model, full, padded, ids):
    prompt, mask = padded
    counted = (mask.cumsum(1) - 1).clamp(min=0)
    full(prompt, attention_mask=mask, position_ids=counted)
    full.generate(prompt, attention_mask=mask, position_ids=counted, max_new_tokens=2)
    out = full(ids(20), position_ids=torch.arange(20)[None])
    full(ids(3), position_ids=torch.arange(20, 23)[None], **{CACHE: out[CACHE]})
    state = full.prefill(ids(20))
    for call in (
        lambda: full(ids(20), position_ids=torch.arange(20)[None] + 5),
        lambda: full.generate(ids(20), position_ids=torch.arange(20)[None] + 5, max_new_tokens=2),
    ):
        with pytest.raises(InputError, match="row 0 has 5 in column 0, where its memory counts 0"):
            call()
    with pytest.raises(InputError, match="row 0 has 0 in column 0, where its memory counts 20"):
        full(ids(3), position_ids=torch.arange(3)[None], **{CACHE: state})
    with pytest.raises(InputError, match="row 1 has 11 in column 11, where its memory counts 0"):
        full(prompt, attention_mask=mask, position_ids=torch.arange(30)[None])
    assert state.lengths == [20]


def test_use_cache_and_tuples(full, ids):
    out = full(ids(9), use_cache=False)
    assert out.get(CACHE) is None
    logits, state = full(ids(9), return_dict=False)
    assert torch.equal(logits, out.logits)
    assert state.lengths == [9]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("output_attentions", True, "keeps no weights; ask the model that was compiled"),
        ("output_hidden_states", True, "a program returns logits alone"),
        ("cache_implementation", "static", "a compiled model has its own memory"),
        ("token_type_ids", torch.zeros(1, 9, dtype=torch.int64), "input_ids"),
        ("pixel_values", torch.zeros(1, 3, 8, 8), "input_ids"),
        ("max_tokens", 5, "input_ids"),
    ],
)
def test_what_there_is_not_is_refused_by_name(full, ids, name, value, message):
    for call in (full.forward, full.generate):
        with pytest.raises(ConfigError, match=rf"(forward|generate)\({name}=\.\.\.\): .*{message}"):
            call(ids(9), **{name: value})


def test_what_a_configuration_asks_for_is_refused_too_but_not_a_checkpoints_default(model, full, ids, make_llama):
    config = transformers.GenerationConfig(max_new_tokens=2, cache_implementation="static")
    with pytest.raises(ConfigError, match=r"generate\(cache_implementation=\.\.\.\)"):
        full.generate(ids(9), generation_config=config)
    other = make_llama(seed=1)
    other.generation_config.cache_implementation = "static"
    other.generation_config.use_cache = False
    compiled = semkv.compile(other)
    assert compiled.generate(ids(9), max_new_tokens=2).shape == (1, 11)
    assert other.generation_config.cache_implementation == "static"
    assert other.generation_config.use_cache is False
    with pytest.raises(ConfigError, match=r"generate\(use_cache=False\)"):
        compiled.generate(ids(9), max_new_tokens=2, use_cache=False)


def test_input_ids_are_needed(full):
    for call in (full.forward, full.generate):
        with pytest.raises(InputError, match="needs input_ids"):
            call()


def test_the_weights_can_be_read_under_their_names(model, full):
    assert dict(full.named_parameters()).keys() == dict(model.named_parameters()).keys()
    for name, parameter in full.named_parameters():
        assert parameter is model.get_parameter(name)
    assert full.num_parameters() == model.num_parameters()
    assert {name for name, _ in model.named_parameters()} <= full.state_dict().keys()
    assert full.device == model.device
    assert full.dtype == model.dtype
    assert next(full.parameters()).dtype == torch.float64


def test_what_changes_nothing_is_done(full):
    assert full.to("cpu") is full.to(torch.float64) is full.double() is full.cpu() is full.eval() is full.train(False)
    assert full.to(device="cpu", dtype=torch.float64) is full
    assert full.requires_grad_(False) is full
    assert full.tie_weights() is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.half(), r"to\(torch.float16\): a compiled model computes in torch.float64"),
        (lambda c: c.bfloat16(), r"to\(torch.bfloat16\)"),
        (lambda c: c.float(), r"to\(torch.float32\)"),
        (lambda c: c.to(dtype=torch.float16), r"CompileConfig\(kv_dtype=\.\.\.\)"),
        (lambda c: c.to("cuda"), r"stays on 'cpu'.*semkv\.compile\(model, device='cuda'\)"),
        (lambda c: c.cuda(), r"to\('cuda'\)"),
        (lambda c: c.to("meta"), r"to\('meta'\)"),
        (lambda c: c.share_memory(), "are those of the model that was compiled"),
        (lambda c: c.train(), "does not train"),
        (lambda c: c.requires_grad_(), "computes no gradients"),
        (lambda c: c.load_state_dict({}), "load them there"),
    ],
)
def test_what_would_change_the_weights_is_refused(model, full, change, message):
    before = {name: (x.dtype, x.device, x.requires_grad) for name, x in model.named_parameters()}
    with pytest.raises(ConfigError, match=message):
        change(full)
    assert before == {name: (x.dtype, x.device, x.requires_grad) for name, x in model.named_parameters()}


def test_names_of_other_classes_say_what_to_use_instead(full):
    for name, instead in (
        ("save_pretrained", r"compiled\.save\(path\)"),
        ("resize_token_embeddings", "compile it again"),
    ):
        assert not hasattr(full, name)
        with pytest.raises(AttributeError, match=instead):
            getattr(full, name)


def test_pipelines_take_a_compiled_model_without_a_warning(caplog):
    model, tokenizer = semkv.bundled.load()
    transformers.utils.logging.enable_propagation()
    try:
        with caplog.at_level(logging.WARNING), warnings.catch_warnings():
            warnings.simplefilter("error")
            pipe = transformers.pipeline("text-generation", model=semkv.compile(model), tokenizer=tokenizer)
            got = pipe(["The code for the", "the garden"], max_new_tokens=6, do_sample=False, batch_size=2)
        assert caplog.messages == []
        pipe.model = torch.nn.Linear(1, 1)
        pipe.check_model_type(transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
        assert "is not supported" in caplog.text  # the check does look
    finally:
        transformers.utils.logging.disable_propagation()
    plain = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    assert got == plain(["The code for the", "the garden"], max_new_tokens=6, do_sample=False, batch_size=2)
