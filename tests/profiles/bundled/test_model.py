"""The committed weights: small, loadable, grouped-query Llama, and able to answer."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from semkv.profiles.bundled import MODEL_DIR
from semkv.profiles.bundled.evaluate import accuracy_table, evidence_tokens, extend_mask
from semkv.profiles.bundled.tasks import FAMILIES, make_haystack


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL_DIR)


def test_folder_is_small_and_complete():
    names = {path.name for path in MODEL_DIR.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= names
    assert sum(path.stat().st_size for path in MODEL_DIR.iterdir()) <= 12e6


def test_architecture(model):
    config = model.config
    assert config.architectures == ["LlamaForCausalLM"]
    assert config.head_dim == 64
    assert config.num_attention_heads == 2 * config.num_key_value_heads
    assert config.max_position_embeddings >= 16384


def test_answers_with_the_evidence_and_not_without():
    rows = accuracy_table(MODEL_DIR, {512: 6}, report=False)
    assert [row["family"] for row in rows] == list(FAMILIES)
    assert all(row["exact"] >= 5 and row["exact_without_evidence"] <= 1 for row in rows)


def test_generate_gives_the_answer(model, tokenizer):
    haystack = make_haystack("dense", 600, 7)
    question = haystack.questions[0]
    ids = tokenizer(haystack.context + question.text, return_tensors="pt")["input_ids"]
    n_new = len(question.answer.split())
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=n_new, do_sample=False)
    assert tokenizer.decode(out[0, ids.shape[1] :]) == question.answer


def test_evidence_tokens_are_the_sentences_words(tokenizer):
    haystack = make_haystack("multi", 400, 3)
    offsets = tokenizer(haystack.context, return_offsets_mapping=True)["offset_mapping"]
    hidden = evidence_tokens(offsets, haystack.questions[0])
    spelled = [haystack.context[slice(*offsets[i])] for i in hidden]
    assert spelled == [w for a, b in sorted(haystack.questions[0].evidence) for w in haystack.context[a:b].split()]
    mask = extend_mask(len(offsets), 5, hidden)
    assert mask.shape == (1, 1, 5, len(offsets) + 5)
    assert torch.isinf(mask[0, 0, :, hidden]).all()
    assert mask[0, 0, 4, -1] == 0
    assert torch.isinf(mask[0, 0, 0, -1])
