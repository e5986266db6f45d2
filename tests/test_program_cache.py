"""Captured programs on disk: the same answers on the model's own tensors, and never a wrong or damaged entry."""

from __future__ import annotations

import copy
import os
import warnings
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import semkv
from semkv.artifact.fingerprint import model_fingerprint, program_fingerprint
from semkv.artifact.state_file import load_tensors, save_tensors
from semkv.compiled import CompiledModel
from semkv.compiler import program_cache
from semkv.compiler.pipeline import among_ranks, captured_program
from semkv.config import CompileConfig
from semkv.errors import ArtifactError, InputError
from semkv.ir.graph import shape_of
from semkv.ir.program import Program
from semkv.ir.ranks import Ranks
from semkv.live import model as live_model
from semkv.methods import find_method
from semkv.passes.shard_heads import weights_of

CACHED = CompileConfig(cache=True)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=41,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        head_dim=8,
        num_key_value_heads=2,
        max_position_embeddings=300,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).double().eval()


@pytest.fixture(scope="module")
def fingerprint(model) -> str:
    return model_fingerprint(model)


@pytest.fixture(scope="module")
def program(model) -> Program:
    return captured_program(model)


@pytest.fixture(scope="module")
def filled(model, program, fingerprint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the model's entry."""
    folder, key = tmp_path_factory.mktemp("cache"), program_cache.entry_key(model, fingerprint)
    program_cache.save_captured(program, folder / f"{key}.safetensors", key, model)
    return folder


@pytest.fixture
def captures(program, monkeypatch: pytest.MonkeyPatch) -> list[torch.nn.Module]:
    """The models that were captured; each is given `program`."""
    models: list[torch.nn.Module] = []
    monkeypatch.setattr(program_cache, "captured_program", lambda model: models.append(model) or program)
    return models


@pytest.fixture
def folder(filled, tmp_path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, which compilations use."""
    for path in filled.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setenv(program_cache.FOLDER, str(tmp_path))
    return tmp_path


def ids(tokens: int) -> torch.Tensor:
    return torch.randint(2, 41, (1, tokens), generator=torch.Generator().manual_seed(3))


def test_a_compilation_uses_the_cache_where_it_is_asked_to(model, folder, captures, monkeypatch):
    plain: list[torch.nn.Module] = []
    monkeypatch.setattr(live_model, "captured_program", lambda model: plain.append(model) or captured_program(model))
    semkv.compile(model, config=CACHED)
    assert not plain
    assert not captures
    monkeypatch.setenv(program_cache.FOLDER, str(folder / "none"))
    semkv.compile(model)
    assert plain == [model]
    assert not list((folder / "none").glob("*.safetensors"))  # kernels may be built there at any time


def compiled_of(model, program, method: str, **options) -> CompiledModel:
    return CompiledModel(program, None, find_method(method, options), 0.5, CompileConfig(floor=0), fingerprint=None)


def test_an_entry_gives_the_same_answers_without_a_capture(model, program, fingerprint, folder, captures):
    again = program_cache.cached_program(model, fingerprint)
    assert not captures
    assert again.sites == program.sites
    assert program_fingerprint(again) == program_fingerprint(program)
    for method, options in (("streaming_llm", {}), ("sekv", {"router": "coarse"})):
        mine, theirs = (compiled_of(model, one, method, **options) for one in (again, program))
        assert torch.equal(
            mine.generate(ids(120), max_new_tokens=6, do_sample=False),
            theirs.generate(ids(120), max_new_tokens=6, do_sample=False),
        )


def test_a_cached_program_has_the_shapes_of_a_captured_one(model, program, fingerprint, folder, captures):
    """They are no part of an entry, and passes go by them."""
    again = program_cache.cached_program(model, fingerprint)
    assert not captures
    for mine, theirs in ((again.body, program.body), (again.head, program.head)):
        named = {node.name: shape_of(node) for node in theirs.graph.nodes}
        for node in (node for node in mine.graph.nodes if node.op != "output"):
            shape, expected = shape_of(node), named[node.name]
            assert (shape is None) == (expected is None), node.name
            fixed = [[x if isinstance(x, int) else None for x in each or ()] for each in (shape, expected)]
            assert fixed[0] == fixed[1], node.name


def test_processes_share_a_model_whose_program_was_cached(model, program, fingerprint, folder, captures):
    """The shapes by which it is cut are no part of the entry."""
    again, ranks = program_cache.cached_program(model, fingerprint), Ranks(1, 2, "none")
    assert not captures
    mine, fresh = (among_ranks(one, ranks) for one in (again, program))
    assert mine.sites == fresh.sites
    assert mine.notes[-1] == fresh.notes[-1]
    theirs = weights_of(fresh)
    assert {name: x.shape for name, x in weights_of(mine).items()} == {name: x.shape for name, x in theirs.items()}


def test_the_program_shares_the_models_tensors_and_copies_no_weight(model, fingerprint, folder, captures):
    again = program_cache.cached_program(model, fingerprint)
    theirs = {id(x) for x in model.parameters()}
    ours = {id(x) for part in (again.body, again.head) for x in part.parameters()}
    assert ours == theirs
    (path,) = folder.iterdir()
    _, constants = load_tensors(path, program_cache.KIND, None)
    assert sum(x.nbytes for x in constants.values()) < 4096 < sum(x.nbytes for x in model.parameters())


def test_a_copy_of_the_model_finds_the_entry_and_reads_its_own_weights(model, fingerprint, folder, captures):
    twin = copy.deepcopy(model)
    again = program_cache.cached_program(twin, model_fingerprint(twin))
    assert not captures
    assert {id(x) for x in again.body.parameters()} <= {id(x) for x in twin.parameters()}


def test_new_weights_of_the_same_model_are_another_entry(model, folder, captures):
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.norm.weight.mul_(2)
    program_cache.cached_program(other, model_fingerprint(other))
    assert captures == [other]


def test_the_source_of_passes_counts(model, folder, monkeypatch):
    before = program_cache.entry_key(model, "x")
    monkeypatch.setattr(program_cache, "_source_digest", lambda: "edited")
    assert program_cache.entry_key(model, "x") != before != program_cache.entry_key(model, "y")


def test_the_default_dtype_at_capture_counts(model, folder):
    """A forward may read it: what was captured under another one is another program."""
    before, key = torch.get_default_dtype(), program_cache.entry_key(model, "x")
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert program_cache.entry_key(model, "x") != key
    finally:
        torch.set_default_dtype(before)
    assert program_cache.entry_key(model, "x") == key


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "folder", "other"])
def test_a_damaged_entry_is_a_warning_and_made_anew(model, fingerprint, folder, captures, damage):
    (path,) = folder.iterdir()
    good = path.read_bytes()
    if damage == "flipped":
        middle = len(good) // 2
        path.write_bytes(good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :])
    elif damage == "other":
        save_tensors(path, "state", {}, {}, fingerprint=path.stem)
    elif damage == "folder":
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes(good[:100] if damage == "cut" else b"")
    with pytest.warns(UserWarning, match="captured again, as the cached program cannot be used") as seen:
        program_cache.cached_program(model, fingerprint)
    assert captures == [model]
    if damage == "folder":  # which is not ours to remove
        assert any("was not cached" in str(warning.message) for warning in seen)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert program_cache.load_captured(path, path.stem, model).stage == "found"


def test_an_entry_of_another_model_is_refused(model, folder):
    (path,) = folder.iterdir()
    smaller = copy.deepcopy(model)
    del smaller.model.layers[1]
    with pytest.raises(ArtifactError, match=r"the model has no tensor 'model\.layers\.1\."):
        program_cache.load_captured(path, path.stem, smaller)


def test_a_model_without_identity_is_captured_with_a_warning(model, folder, captures):
    hooked = copy.deepcopy(model)
    hooked.model.register_forward_hook(lambda *args: None)
    with pytest.warns(UserWarning, match="captured without the cache: module 'model' has hooks"):
        program_cache.cached_program(hooked, model_fingerprint(hooked))
    assert captures == [hooked]
    assert len(list(folder.iterdir())) == 1


def test_a_folder_that_cannot_be_written_is_a_warning(model, fingerprint, program, tmp_path, captures, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(program_cache.FOLDER, str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="the captured program was not cached: .*file"):
        assert program_cache.cached_program(model, fingerprint) is program


def test_constants_made_of_parameters_are_refused(model, program, tmp_path):
    other = copy.deepcopy(model)
    with pytest.raises(ArtifactError, match="is made of the model's parameters, which a copy would not follow"):
        program_cache.save_captured(program, tmp_path / "entry.safetensors", "key", other)


def test_what_capture_refuses_is_refused_first(model, folder):
    with pytest.raises(InputError, match="training mode"):
        semkv.compile(copy.deepcopy(model).train(), config=CACHED)


def test_the_entries_used_last_are_kept(tmp_path):
    names = [f"{number:064x}.safetensors" for number in range(5)]
    for age, name in enumerate(names):
        (tmp_path / name).write_bytes(b"entry")
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    (tmp_path / "kernels.json").write_text("{}")
    program_cache.evict(tmp_path, kept=2)
    assert {path.name for path in tmp_path.iterdir()} == {*names[:2], "kernels.json"}


def test_an_entry_that_is_used_counts_as_new(model, folder, captures):
    (entry,) = folder.glob("*.safetensors")
    os.utime(entry, (1000, 1000))
    semkv.compile(model, method="full", config=CACHED)
    assert not captures
    assert entry.stat().st_mtime > 1000
