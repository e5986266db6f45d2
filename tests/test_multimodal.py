"""Prompts with images: the text decoder is compiled, the rest is the model's own code."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import semkv
from semkv.compiled import CompiledModel
from semkv.errors import CaptureError, ConfigError, InputError, StateError
from semkv.generation.eager_prompt import decoder_inputs
from semkv.model.huggingface import CACHE
from tests.conftest import quick_ones
from tests.vlms import IMAGE, MROPE, VIDEO, images, other, own_logits, vlm

SERVED = ("qwen2_5_vl", "qwen3_vl", "llava", "gemma3")
TEXTS = ((17, 9), (15, 14))
SIZES = (4, 8)
NEAR = 1e-5

_made: dict[str, tuple[nn.Module, CompiledModel]] = {}


def made(name: str) -> tuple[nn.Module, CompiledModel]:
    """A model and its compiled form, once."""
    if name not in _made:
        model = vlm(name)
        _made[name] = model, semkv.compile(model, method="full")
    return _made[name]


def turns() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(10, 190, (2, tokens), generator=generator) for tokens in (6, 1, 1, 5)]


def apart(a: list[Tensor], b: list[Tensor], mask: Tensor) -> list[float]:
    """How much logits differ at most, of the prompt's tokens and of each turn."""
    return [float((x - y)[mask.bool() if n == 0 else ...].abs().max()) for n, (x, y) in enumerate(zip(a, b))]


@pytest.mark.parametrize("name", quick_ones(SERVED, ("qwen3_vl", "gemma3")))
def test_an_image_and_the_text_behind_it_are_the_models_own(name: str) -> None:
    model, compiled = made(name)
    prompt = images(name, SIZES, TEXTS)
    expected = own_logits(model, prompt, turns())
    other = own_logits(model, prompt | {"pixel_values": images(name, SIZES, TEXTS, 2)["pixel_values"]}, turns())
    out = compiled(**prompt)
    state = out[CACHE]
    alone = state.select([1])
    logits = [out.logits, *(compiled(turn, cache=state).logits for turn in turns())]
    differ = apart(logits, expected, prompt["attention_mask"])
    assert max(differ) < NEAR
    assert min(apart(other, expected, prompt["attention_mask"])) > 1e4 * max(differ), "the image decides nothing"

    # a row alone runs another graph than rows together
    single = [compiled(turn[1:], cache=alone).logits for turn in turns()]
    assert max(float((x - y[1:]).abs().max()) for x, y in zip(single, expected[1:])) < NEAR
    assert [row.turned < 0 for row in alone.rows] == [name in MROPE]
    if name in MROPE:
        forgetful = compiled.prefill(**prompt)
        for row in forgetful.rows:
            row.turned = 0
        wrong = compiled(turns()[0], cache=forgetful).logits
        assert float((wrong - expected[1]).abs().max()) > 1e-2, "rotary positions decide nothing"


@pytest.mark.parametrize("name", quick_ones(SERVED, ("qwen3_vl", "gemma3")))
def test_generate_takes_what_the_processor_makes(name: str) -> None:
    model, compiled = made(name)
    prompt = images(name, SIZES, TEXTS)
    expected = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    out = compiled.generate(**prompt, max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
    assert torch.equal(out.sequences, expected)
    state = out[CACHE]
    question = turns()[0]
    answer = compiled.generate(question, state=state, max_new_tokens=4, do_sample=False)
    (told,) = own_logits(model, prompt, [torch.cat([expected[:, prompt["input_ids"].shape[1] :], answer], 1)])[1:]
    assert torch.equal(told[:, 7 + question.shape[1] : -1].argmax(-1)[:, -4:], answer[:, question.shape[1] :])
    beams = {"num_beams": 2, "max_new_tokens": 4, "do_sample": False}
    assert torch.equal(compiled.generate(**prompt, **beams), model.generate(**prompt, **beams))


@pytest.mark.parametrize("method", ["snapkv", "quest", "sekv"])
def test_images_are_compressed_within_the_budget(method: str) -> None:
    model, compiled = made("qwen3_vl")
    prompt = images("qwen3_vl", SIZES, ((97, 80), (105, 114)))
    small = compiled.with_method(method, 0.5, config=semkv.CompileConfig(floor=0))
    state = small.prefill(**prompt)
    for turn in turns():
        small.extend(state, turn)
    assert state.lengths == [length + 13 for length in prompt["attention_mask"].sum(1).tolist()]
    assert state.nbytes["peak"] <= 0.5 * state.full_bytes
    assert 0.5 < state.stats.peak_share <= 1.0
    whole = compiled.with_method(method, 1.0)
    again = whole.prefill(**prompt)
    expected = own_logits(model, prompt, turns()[:1])[1]
    assert float((whole.extend(again, turns()[0], all_logits=True) - expected).abs().max()) < NEAR


def test_the_pieces_of_a_prompt_change_nothing() -> None:
    _, compiled = made("qwen3_vl")
    prompt = images("qwen3_vl", SIZES, TEXTS)
    whole = compiled.prefill(**prompt)
    for chunk in (7, 10):  # that end inside of images, and one token before the end
        state = compiled.with_method("full", config=semkv.CompileConfig(prefill_chunk=chunk)).prefill(**prompt)
        assert float((state.logits - whole.logits).abs().max()) < NEAR
        assert state.next_rotary == whole.next_rotary
    assert whole.next_rotary == [26 + 2 + 4, 29 + 2 + 4]  # an image takes as many as its longer side


def test_a_second_image_comes_with_its_turn() -> None:
    name = "qwen3_vl"
    model, compiled = made(name)
    first, second = images(name, (4,), ((17, 9),)), images(name, (8,), ((3, 11),), seed=4)
    both = {key: torch.cat([first[key], second[key]], int(key in ("input_ids", "attention_mask", "mm_token_type_ids")))
            for key in first}  # fmt: skip
    with torch.no_grad():
        expected = model(**both).logits[:, -1:]
    state = compiled.prefill(**first)
    state.pending = second["input_ids"][:, :1]  # as `generate` leaves one
    turn = second | {key: second[key][:, 1:] for key in ("input_ids", "attention_mask", "mm_token_type_ids")}
    assert float((compiled.extend(state, **turn) - expected).abs().max()) < NEAR
    with pytest.raises(InputError, match="nobody can tell whether its images are the same ones"):
        compiled.generate(**both, state=compiled.prefill(**first))
    again = compiled.prefill(**first)
    assert (
        float((compiled.extend(again, **compiled.prompt_inputs(state=again, **second)) - expected).abs().max()) < NEAR
    )
    pieces = compiled.begin()
    for part in (first, second):
        logits = pieces.feed(**{key: part[key] for key in part if key != "attention_mask"})
    assert float((logits - expected[0]).abs().max()) < NEAR
    assert pieces.finish().next_rotary == again.next_rotary


def test_an_artifact_reads_what_the_models_code_made(tmp_path: Path) -> None:
    name = "qwen3_vl"
    model, compiled = made(name)
    compiled.save(tmp_path / "decoder")
    loaded = semkv.load(tmp_path / "decoder")
    prompt = images(name, SIZES, TEXTS)
    expected = model.generate(**prompt, max_new_tokens=6, do_sample=False)[:, prompt["input_ids"].shape[1] :]
    with pytest.raises(ConfigError, match=r"generate\(pixel_values=...\).*compiled.prompt_inputs\(model, \*\*inputs\)"):
        loaded.generate(**prompt)
    read = loaded.prompt_inputs(model, **prompt)
    assert sorted(read["layer_inputs"]) == [1, 2]
    assert torch.equal(loaded.generate(**read, max_new_tokens=6, do_sample=False), expected)
    quest = loaded.with_method("quest", 0.5)  # lowered again, of graphs without metadata
    assert float((quest.prefill(**read).logits - compiled.prefill(**prompt).logits).abs().max()) < NEAR
    text = prompt["input_ids"][:, -9:]
    assert torch.equal(
        loaded.generate(text, mm_token_type_ids=torch.zeros_like(text), max_new_tokens=3),
        compiled.generate(text, max_new_tokens=3),
    )

    state = loaded.prefill(**read)
    state.save(tmp_path / "state")
    again = loaded.load_state(tmp_path / "state")
    assert [row.turned for row in again.rows] == [row.turned for row in state.rows] != [0, 0]
    turn = turns()[0]
    assert torch.equal(loaded.extend(again, turn), loaded.extend(state, turn))


def test_the_model_is_not_touched_and_its_errors_are_its_own() -> None:
    name = "qwen3_vl"
    model, compiled = made(name)
    prompt = images(name, SIZES, TEXTS)
    before = {path: dict(module.__dict__) for path, module in model.named_modules()}
    compiled.prefill(**prompt)
    assert {path: dict(module.__dict__) for path, module in model.named_modules()} == before
    with pytest.raises(ValueError, match="do not match"):
        compiled.prefill(**prompt | {"input_ids": prompt["input_ids"].where(prompt["input_ids"] != IMAGE, 11)})
    with pytest.raises(ValueError, match="mm_token_type_ids"):
        compiled.prefill(**{key: value for key, value in prompt.items() if key != "mm_token_type_ids"})
    with pytest.raises(ConfigError, match=r"generate\(pixels=...\): neither an argument of generate nor an input"):
        compiled.generate(prompt["input_ids"], pixels=prompt["pixel_values"])
    blind = {key: prompt[key] for key in ("input_ids", "attention_mask")}  # as in the model: the tokens' own embeddings
    assert torch.equal(
        compiled.generate(**blind, max_new_tokens=5, do_sample=False),
        model.generate(**blind, max_new_tokens=5, do_sample=False),
    )


def test_positions_of_several_axes_are_the_users_to_give() -> None:
    model, compiled = made("qwen3_vl")
    ids = turns()[0]
    generator = torch.Generator().manual_seed(3)
    positions = torch.randint(0, 40, (3, *ids.shape), generator=generator)
    with torch.no_grad():
        expected = model(input_ids=ids, position_ids=positions).logits
    embeds = model.get_input_embeddings()(ids).detach()
    assert float((compiled(ids, position_ids=positions).logits - expected).abs().max()) < NEAR
    assert float((compiled(inputs_embeds=embeds, position_ids=positions).logits - expected).abs().max()) < NEAR
    with pytest.raises(InputError, match=r"\[3, B, T\] or \[4, B, T\] is expected"):
        compiled(ids, position_ids=positions[:2])
    with pytest.raises(InputError, match="position ids"):
        compiled(ids, position_ids=positions[:, :, :3])
    with pytest.raises(InputError, match="layer_inputs"):
        compiled(ids, layer_inputs={7: embeds})


def test_images_whose_tokens_attend_both_ways() -> None:
    model, compiled = made("gemma3")
    prompt = images("gemma3", SIZES, TEXTS)
    causal = {key: value for key, value in prompt.items() if key != "token_type_ids"}
    with torch.no_grad():
        assert float((model(**prompt).logits - model(**causal).logits)[:, -1].abs().max()) > 1e-2
    read = compiled.prompt_inputs(**prompt)
    assert read["both_ways"] == [[(20, 36)], [(15, 31)]]
    small = compiled.with_method("full", config=semkv.CompileConfig(prefill_chunk=7))
    logits = small.prefill(**read).logits
    assert float((logits - own_logits(model, prompt, [])[0][:, -1]).abs().max()) < NEAR
    first = images("gemma3", (4,), ((0, 9),))  # a prompt that begins with an image
    assert float((small.prefill(**first).logits - own_logits(model, first, [])[0][:, -1]).abs().max()) < NEAR
    tokens = compiled.with_method("quest", 0.5, config=semkv.CompileConfig(floor=0)).prefill(
        **images("gemma3", SIZES, ((97, 80), (105, 114)))
    )
    assert tokens.nbytes["peak"] <= 0.5 * tokens.full_bytes

    state = compiled.prefill(**prompt)
    with pytest.raises(ConfigError, match="pass them in the prompt that begins the row"):
        compiled.generate(**images("gemma3", SIZES, ((3, 2), (3, 2)), 4), state=state)
    with pytest.raises(InputError, match="both_ways: expected for each of 2 rows runs"):
        compiled.prefill(**read | {"both_ways": [[(20, 60)], []]})
    ids = torch.randint(10, 190, (2, 40), generator=torch.Generator().manual_seed(2))
    text = {"input_ids": ids, "token_type_ids": torch.zeros_like(ids), "max_new_tokens": 5, "do_sample": False}
    assert torch.equal(compiled.generate(**text), model.generate(**text))


def test_masks_that_no_program_has_are_refused() -> None:
    model, compiled = made("gemma3")
    prompt = images("gemma3", SIZES, TEXTS)
    ids = prompt["input_ids"]
    allowed = torch.ones(2, 1, ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
    allowed[0, 0, 40:, 25] = False
    masks = {"full_attention": allowed, "sliding_attention": torch.ones_like(allowed).tril().triu(-23)}
    with pytest.raises(CaptureError, match="in column 40 of row 0 does not read that in column 25"):
        decoder_inputs(model, compiled.program, prompt | {"attention_mask": masks})
    narrow = replace(compiled.program, sites=tuple(replace(site, window=9) for site in compiled.program.sites))
    with pytest.raises(CaptureError, match=r"16 tokens of this prompt .* has a window of 9"):
        decoder_inputs(model, narrow, prompt)


@pytest.mark.parametrize("name", quick_ones(("qwen2_vl", "glm4v", "smolvlm", "mistral3", "internvl", "llava_next"), ()))
def test_families_that_nobody_wrote_anything_for(name: str) -> None:
    model, prompt = other(name)
    turn = turns()[0][:1]
    expected = own_logits(model, prompt, [turn])
    compiled = semkv.compile(model, method="full")
    out = compiled(**prompt)
    differ = apart([out.logits, compiled(turn, cache=out[CACHE]).logits], expected, prompt["attention_mask"])
    largest = max(float(x.abs().max()) for x in expected)
    assert max(differ) < NEAR * max(1.0, largest)
    blind = compiled(**{key: prompt[key] for key in ("input_ids", "attention_mask")}).logits
    assert float((blind - expected[0])[:, -1].abs().max()) > 1e3 * max(differ), "the image decides nothing"


@pytest.mark.slow
def test_a_video() -> None:
    model, compiled = made("qwen2_5_vl")
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(10, 190, (1, 20), generator=generator)
    ids = torch.cat([text[:, :8], torch.full((1, 16), VIDEO), text[:, 8:]], 1)
    prompt = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": (ids == VIDEO).int() * 2}
    prompt |= {"video_grid_thw": torch.tensor([[2, 4, 8]]), "second_per_grid_ts": torch.tensor([1.0])}
    prompt["pixel_values_videos"] = torch.randn(64, 96, generator=generator)
    turn = turns()[0][:1]
    expected = own_logits(model, prompt, [turn])
    out = compiled(**prompt)
    assert max(apart([out.logits, compiled(turn, cache=out[CACHE]).logits], expected, ids)) < NEAR


@pytest.mark.slow
def test_adapters_around_a_vision_language_model() -> None:
    peft = pytest.importorskip("peft", reason="adapters are those of PEFT")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    tuned = peft.get_peft_model(vlm("llava"), config).eval()
    prompt = images("llava", SIZES, TEXTS)
    asked = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(
        semkv.compile(tuned, method="full").generate(**prompt, **asked), tuned.generate(**prompt, **asked)
    )


@pytest.mark.slow
def test_cross_attention_to_images_is_refused() -> None:
    model, prompt = other("mllama")
    compiled = semkv.compile(model, method="full")
    with pytest.raises(CaptureError, match="is given cross_attention_states besides hidden states"):
        compiled.generate(**prompt)


def test_exported_steps_refuse_rows_behind_images(tmp_path: Path) -> None:
    _, compiled = made("qwen3_vl")
    state = compiled.prefill(**images("qwen3_vl", SIZES, TEXTS))
    with pytest.raises(StateError, match="has read images"):
        compiled.export_state(state, tmp_path / "state.safetensors")
